"""The Hopper matrix product against float64: shapes that are no whole tiles, poisoned memory, equal bits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flashrt_ros.ops import ShapeError
from flashrt_ros.ops.cuda import gemm
from flashrt_ros.ops.cuda.gemm import Behind
from test.gpu.fused import DEVICE, distance
from test.gpu.replays import assert_replays_give_equal_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]
RMS_WIDTH = 2048  # the width that the kernel of the factors is written for
BOUND = 2.6e-3  # one rounding to bfloat16 is 1.7e-3 of a random vector
TALL: dict[str, int] = {"TILE_ROWS": 256}
LARGE: dict[str, int] = {"TILE_ROWS": 240, "CONSUMERS": 3}
LONG_RING: dict[str, int] = {**LARGE, "STAGES": 4, "CHUNKS": 6}  # beside little staged output


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).bfloat16()


def exact(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    factor = 1.0 if scale is None else scale.double()[:, None]
    return x.double() @ weight.double().t() * factor


def geglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=1)
    return F.gelu(gate, approximate="tanh") * up


def poisoned(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Rows of a larger buffer, as in the arena, and what lies behind them."""
    buffer = torch.full((rows + 50, columns), float("nan"), device=DEVICE, dtype=torch.bfloat16)
    return buffer[:rows], buffer[rows:]


@pytest.mark.parametrize("variant", [{}, TALL, LARGE, LONG_RING, {"TILE_ROWS": 184}, {"STAGES": 3}])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("rows", "inputs", "hidden"),
    [(712, 2048, 16384), (968, 2048, 1024), (1, 64, 128), (7, 192, 64 * 2), (241, 2048, 8192), (483, 4096, 640)],
)
def test_gate_up_geglu(rows: int, inputs: int, hidden: int, overlap: bool, variant: dict[str, int]) -> None:
    x, weight = draw(rows, inputs, scale=3), draw(2 * hidden, inputs, scale=inputs**-0.5)
    scale = torch.full((rows,), float("nan"), device=DEVICE)
    out, behind = poisoned(rows, hidden)
    inverse = torch.rsqrt(x.double().square().mean(1) + 1e-6)
    if inputs == RMS_WIDTH:
        gemm.inverse_rms_rows(x, eps=1e-6, out=scale, overlap=overlap)
    else:
        scale.copy_(inverse)
    gemm.gate_up_geglu(x, weight, out=out, behind=Behind(scale=scale), overlap=overlap, variant=variant)
    assert distance(scale.double(), inverse) < 1e-6
    assert distance(out.double(), geglu(exact(x, weight, inverse))) < BOUND
    assert behind.isnan().all()


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(712, 2048, 2560), (712, 16384, 2048), (50, 64, 128)])
@pytest.mark.parametrize("scaled", [False, True])
def test_product(rows: int, inputs: int, outputs: int, scaled: bool) -> None:
    x, weight = draw(rows, inputs), draw(outputs, inputs, scale=inputs**-0.5)
    scale = torch.rand(rows, device=DEVICE) + 0.5 if scaled else None
    out, behind = poisoned(rows, outputs)
    gemm.product(x, weight, out=out, behind=Behind(scale=scale))
    assert distance(out.double(), exact(x, weight, scale)) < BOUND
    assert behind.isnan().all()


@pytest.mark.parametrize("sharers", [(2, 1), (4, 1), (1, 2), (3, 2), (2, 2), (1, 8)])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(512, 1152, 1152), (200, 192, 1040), (7, 2048, 136)])
def test_blocks_that_fetch_for_each_other_give_equal_bits(
    rows: int, inputs: int, outputs: int, sharers: tuple[int, int]
) -> None:
    x, weight, tile = draw(rows, inputs), draw(outputs, inputs, scale=inputs**-0.5), {"TILE_ROWS": 104}
    alone, out = poisoned(rows, outputs)[0], poisoned(rows, outputs)
    gemm.product(x, weight, out=alone, variant=tile)
    sharing = {"SHARE_X": sharers[0], "SHARE_WEIGHTS": sharers[1]}
    for overlap in (False, True, True):
        gemm.product(x, weight, out=out[0], overlap=overlap, variant={**tile, **sharing})
        assert torch.equal(out[0], alone)
        assert out[1].isnan().all()
    assert distance(alone.double(), exact(x, weight, None)) < BOUND


@pytest.mark.parametrize("variant", [{}, TALL, LARGE])
def test_replays_give_equal_bits_with_and_without_overlap(variant: dict[str, int]) -> None:
    inputs = [draw(712, 2048, scale=1 + i) for i in range(4)]
    weight, x = draw(4096, 2048, scale=0.02), torch.empty_like(inputs[0])
    scale = torch.empty(712, device=DEVICE)
    outs = torch.empty(4, 712, 2048, device=DEVICE, dtype=torch.bfloat16)

    def body(overlap: bool) -> None:
        for source, out in zip(inputs, outs, strict=True):
            x.copy_(source)
            gemm.inverse_rms_rows(x, eps=1e-6, out=scale, overlap=overlap)
            gemm.gate_up_geglu(x, weight, out=out, behind=Behind(scale=scale), overlap=overlap, variant=variant)

    assert_replays_give_equal_bits(body, outs, replays=200)


def test_sizes_that_make_no_whole_groups_of_weights_are_refused() -> None:
    with pytest.raises(ShapeError, match="product: 'weight' dimension 0 must be a multiple of 8, got 132"):
        gemm.product(draw(4, 96), draw(132, 96), out=draw(4, 132))
    with pytest.raises(ShapeError, match="gate_up_geglu: 'weight' dimension 0 must be a multiple of 16, got 248"):
        gemm.gate_up_geglu(draw(4, 96), draw(248, 96), out=draw(4, 124))
