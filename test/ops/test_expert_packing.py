"""How the expert's weights are packed for streaming, and how a block's shared memory is laid out."""

from __future__ import annotations

import pytest
import torch

from flashrt_ros.ops import ShapeError
from flashrt_ros.ops.cuda.errors import KernelError
from flashrt_ros.ops.cuda.expert import pack, pack_tiles, rotary_pairs, shared_layout


def test_a_stage_holds_eight_outputs_in_the_order_of_the_lanes() -> None:
    layers, outputs, inputs = 2, 24, 2048
    weight = torch.arange(layers * outputs * inputs).view(layers, outputs, inputs)
    packed = pack_tiles(weight)
    assert packed.shape == (layers, outputs // 8, inputs // 1024, 8192)
    for layer, output, column in ((0, 0, 0), (1, 23, 2047), (1, 9, 1024 + 5 * 32 + 2 * 8 + 3), (0, 17, 700)):
        chunk, inside = divmod(column, 1024)
        group, rest = divmod(inside, 32)
        quad, element = divmod(rest, 8)
        place = ((group * 8 + output % 8) * 4 + quad) * 8 + element
        assert packed[layer, output // 8, chunk, place] == weight[layer, output, column]


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


@pytest.mark.parametrize("rows", [1, 10, 33, 64])
def test_shared_memory_of_a_hopper_block_is_used_but_not_exceeded(rows: int) -> None:
    stages, nbytes = shared_layout(rows, 232448)
    assert stages >= 8
    assert 232448 - 16400 < nbytes <= 232448


def test_too_little_shared_memory_is_refused() -> None:
    with pytest.raises(KernelError, match="10 rows need .* bytes of shared memory a block, there are 101376"):
        shared_layout(10, 101376)
