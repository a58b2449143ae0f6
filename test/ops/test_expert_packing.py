"""How the expert's weights are packed for streaming, and how a block's shared memory is laid out."""

from __future__ import annotations

import pytest
import torch

from flashrt_ros.ops import ShapeError
from flashrt_ros.ops.cuda.errors import KernelError
from flashrt_ros.ops.cuda.expert import alternate_tiles, keys_of_a_block, pack, pack_tiles, rotary_pairs, shared_layout


def test_a_tile_holds_matrices_of_eight_outputs_by_eight_inputs() -> None:
    layers, outputs, inputs = 2, 24, 2048
    weight = torch.arange(layers * outputs * inputs).view(layers, outputs, inputs)
    packed = pack_tiles(weight)
    assert packed.shape == (layers, 8, 4, outputs // 8, 8, 8, 8)
    assert packed.is_contiguous()
    for layer, output, column in ((0, 0, 0), (1, 23, 2047), (1, 9, 1024 + 5 * 32 + 2 * 8 + 3), (0, 17, 700)):
        rank, inside = divmod(column, inputs // 8)
        chunk, rest = divmod(inside, 64)
        group, element = divmod(rest, 8)
        got = packed[layer, rank, chunk, output // 8, group, output % 8, element]
        assert got == weight[layer, output, column]


def test_tiles_of_gate_and_up_alternate() -> None:
    weight = torch.arange(64)[None, :, None]  # 32 of gate, 32 of up
    order = alternate_tiles(weight).flatten().tolist()
    assert order[:24] == [*range(8), *range(32, 40), *range(8, 16)]
    assert sorted(order) == list(range(64))


def test_rotary_pairs_stand_side_by_side() -> None:
    order = rotary_pairs(2)
    assert sorted(order.tolist()) == list(range(512))
    assert order[:4].tolist() == [0, 128, 1, 129]
    assert order[256:260].tolist() == [256, 384, 257, 385]


def test_wrong_weights_are_named() -> None:
    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, device="meta")

    ends = (zeros(1024, 32), zeros(1024)), (zeros(32, 1024), zeros(32))
    with pytest.raises(ShapeError, match="expert weights: 'down' dimension 2 must be 4096"):
        pack(zeros(1, 2560, 1024), zeros(1, 1024, 2048), zeros(1, 8192, 1024), zeros(1, 1024, 2048), *ends)


@pytest.mark.parametrize(("rows", "capacity"), [(1, 40), (10, 712), (10, 968), (15, 712), (16, 712), (50, 968)])
def test_shared_memory_of_a_hopper_block_is_used_but_not_exceeded(rows: int, capacity: int) -> None:
    stages, nbytes = shared_layout(rows, keys_of_a_block(capacity, rows), 15, 232448)
    assert stages >= (8 if rows < 16 else 4)
    assert 232448 - 8208 < nbytes <= 232448


@pytest.mark.parametrize(
    ("capacity", "rows", "keys"),
    [(712, 10, 96), (968, 10, 128), (968, 50, 128), (1, 1, 16), (118, 10, 16), (119, 10, 32)],
)
def test_a_block_has_room_for_an_eighth_of_the_keys(capacity: int, rows: int, keys: int) -> None:
    assert keys_of_a_block(capacity, rows) == keys


@pytest.mark.parametrize(("rows", "capacity", "clusters"), [(5, 968, 2), (10, 712, 3), (15, 712, 5), (15, 968, 7)])
def test_a_ring_too_shallow_for_all_teams_at_once_is_refused(rows: int, capacity: int, clusters: int) -> None:
    """With four to seven stages the teams of few rows would wait for each other for ever."""
    with pytest.raises(KernelError, match="bytes of shared memory a block, there are 232448"):
        shared_layout(rows, keys_of_a_block(capacity, rows), clusters, 232448)


def test_too_little_shared_memory_is_refused() -> None:
    with pytest.raises(KernelError, match="10 rows and 96 keys .* bytes of shared memory a block, there are 101376"):
        shared_layout(10, 96, 15, 101376)
