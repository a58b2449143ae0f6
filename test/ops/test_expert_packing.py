"""How the expert's weights are packed for streaming, and how a block's shared memory is laid out."""

from __future__ import annotations

import pytest
import torch

from flashrt_ros.ops import ShapeError
from flashrt_ros.ops.cuda.errors import KernelError
from flashrt_ros.ops.cuda.expert import (
    ShiftTables,
    alternate_tiles,
    keys_of_a_block,
    pack,
    pack_tiles,
    rotary_pairs,
    shared_layout,
    unpack_tiles,
)


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


def test_packing_can_be_undone() -> None:
    weight = torch.arange(2 * 24 * 2048).view(2, 24, 2048)
    assert torch.equal(unpack_tiles(pack_tiles(weight)), weight)


def test_tables_hold_what_the_shifts_give() -> None:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    qkv, gate_up = (drawn(2, outputs, 1024).bfloat16() for outputs in (2560, 8192))
    zeros = torch.zeros(2, 1024, 2048).bfloat16(), torch.zeros(2, 1024, 4096).bfloat16()
    leave, bias = drawn(32, 1024), drawn(32)
    weights = pack(qkv, zeros[0], gate_up, zeros[1], (torch.zeros(1024, 32), torch.zeros(1024)), (leave, bias))
    modulation = drawn(3, 5, 3, 1024)
    tables = ShiftTables.allocate(weights, steps=3)
    tables.fill(weights, modulation)
    order = torch.cat((rotary_pairs(9), torch.arange(2304, 2560)))
    torch.testing.assert_close(tables.project[2, 1], qkv[1, order].float() @ modulation[2, 2, 1], rtol=1e-4, atol=1e-3)
    gate, up = (gate_up[0, start : start + 4096].float() @ modulation[1, 1, 1] for start in (0, 4096))
    torch.testing.assert_close(tables.gate_up[1, 0, :8], gate[:8], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(tables.gate_up[1, 0, -8:], up[-8:], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(tables.leave[0], leave @ modulation[0, 4, 1] + bias, rtol=1e-4, atol=1e-3)


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
    assert stages >= 4
    assert 232448 - 8208 < nbytes <= 232448


@pytest.mark.parametrize(
    ("capacity", "rows", "keys"),
    [(712, 10, 96), (968, 10, 128), (968, 50, 128), (1, 1, 16), (118, 10, 16), (119, 10, 32)],
)
def test_a_block_has_room_for_an_eighth_of_the_keys(capacity: int, rows: int, keys: int) -> None:
    assert keys_of_a_block(capacity, rows) == keys


def test_too_little_shared_memory_is_refused() -> None:
    with pytest.raises(KernelError, match="10 rows and 96 keys .* bytes of shared memory a block, there are 101376"):
        shared_layout(10, 96, 15, 101376)
