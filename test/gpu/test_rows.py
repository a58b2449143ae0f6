"""Kernels on rows against their references, in float64, with poisoned outputs and the aliasing of the pipeline."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashrt_ros.ops import ShapeError, linear, norms, pixels, rope
from flashrt_ros.ops.cuda import rows as kernels
from flashrt_ros.ops.cuda.errors import KernelError
from test.gpu.fused import DEVICE, NEEDS_KERNELS, distance

pytestmark = NEEDS_KERNELS

BOUND = 2.5e-3  # one rounding to bfloat16 is 1.7e-3 of a random vector
OVERLAP = pytest.mark.parametrize("overlap", [False, True])


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).bfloat16()


def poisoned(*shape: int) -> Tensor:
    return torch.full(shape, float("nan"), device=DEVICE, dtype=torch.bfloat16)


@OVERLAP
@pytest.mark.parametrize("rows", [1, 511, 768])
@pytest.mark.parametrize("with_branch", [False, True])
def test_layer_norm(rows: int, with_branch: bool, overlap: bool) -> None:
    x, weight, bias, out = draw(rows, 1152, scale=3) + 1, draw(1152), draw(1152), poisoned(rows, 1152)
    branch = draw(rows, 1152) if with_branch else None
    total = x if branch is None else x + branch
    expected = torch.empty(rows, 1152, device=DEVICE, dtype=torch.float64)
    norms.layer_norm(total.double(), weight.double(), bias.double(), eps=1e-6, out=expected)
    kernels.layer_norm(x, weight, bias, eps=1e-6, out=out, branch=branch, overlap=overlap)
    assert distance(out.double(), expected) < BOUND
    assert torch.equal(x, total)


@OVERLAP
@pytest.mark.parametrize("rows", [10, 50])
def test_gated_residual_ada_rms_norm(rows: int, overlap: bool) -> None:
    residual, branch, out = draw(rows, 1024), draw(rows, 1024), poisoned(rows, 1024)
    gate, modulation = torch.randn(1024, device=DEVICE), torch.randn(3, 1024, device=DEVICE)
    kept, expected = residual.clone(), torch.empty(rows, 1024, device=DEVICE)
    norms.gated_residual_ada_rms_norm(kept, branch, gate, modulation, eps=1e-6, out=expected)
    kernels.gated_residual_ada_rms_norm(residual, branch, gate, modulation, eps=1e-6, out=out, overlap=overlap)
    assert distance(out.double(), expected.double()) < BOUND
    assert distance(residual.double(), kept.double()) < 1e-4


@OVERLAP
def test_residual_rms_norm(overlap: bool) -> None:
    residual, branch, out = draw(70, 2048), draw(70, 2048), poisoned(70, 2048)
    kept, expected = residual.clone(), torch.empty(70, 2048, device=DEVICE)
    norms.residual_rms_norm(kept, branch, eps=1e-6, out=expected)
    kernels.residual_rms_norm(residual, branch, eps=1e-6, out=out, overlap=overlap)
    assert distance(out.double(), expected.double()) < BOUND
    assert torch.equal(residual, kept)


@pytest.mark.parametrize("rows", [1, 131])
@pytest.mark.parametrize("width", [128, 256, 640, 896, 1536, 4096])
def test_norms_of_other_widths(width: int, rows: int) -> None:
    x, weight, bias, out = draw(rows, width) + 1, draw(width), draw(width), poisoned(rows, width)
    expected = torch.empty(rows, width, device=DEVICE, dtype=torch.float64)
    norms.layer_norm(x.double(), weight.double(), bias.double(), eps=1e-6, out=expected)
    kernels.layer_norm(x, weight, bias, eps=1e-6, out=out)
    assert distance(out.double(), expected) < BOUND
    norms.residual_rms_norm(x.double(), None, eps=1e-6, out=expected)
    kernels.residual_rms_norm(x, None, eps=1e-6, out=out)
    assert distance(out.double(), expected) < BOUND


@OVERLAP
@pytest.mark.parametrize("with_query", [False, True])
@pytest.mark.parametrize("normalised", [False, True])
def test_split_rope_write(with_query: bool, normalised: bool, overlap: bool) -> None:
    rows, heads = 77, 10 if with_query else 2
    qkv, x, table = draw(rows, heads * 256, scale=3), draw(rows, 2048, scale=5), poisoned(rows, 256)
    rope.rope_table(theta=1e4, out=table)
    key, value = poisoned(rows, 1, 256), poisoned(rows, 1, 256)
    wide = qkv.double()
    if not normalised:
        wide = wide * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6)
    wanted = [torch.empty(rows, n, 256, device=DEVICE, dtype=torch.float64) for n in (8, 1, 1)]
    rope.split_rope_write(wide, table, query=wanted[0] if with_query else None, key=wanted[1], value=wanted[2])
    query = qkv[:, :2048].view(rows, 8, 256) if with_query else None  # in place, as in the pipeline
    kernels.split_rope_write(
        qkv, table, query=query, key=key, value=value, residual=None if normalised else x, eps=1e-6, overlap=overlap
    )
    for got, expected in zip((query, key, value), wanted, strict=True):
        assert got is None or distance(got.double(), expected) < BOUND


@OVERLAP
@pytest.mark.parametrize("normalised", [False, True])
def test_geglu(normalised: bool, overlap: bool) -> None:
    gate_up, x, out = draw(33, 32768, scale=3), draw(33, 2048, scale=2), poisoned(33, 16384)
    wide = gate_up.float()
    if not normalised:
        wide = wide * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    expected = torch.empty(33, 16384, device=DEVICE)
    linear.geglu(wide, out=expected)
    kernels.geglu(gate_up, out=out, residual=None if normalised else x, eps=1e-6, overlap=overlap)
    assert distance(out.double(), expected.double()) < BOUND


@pytest.mark.parametrize(
    "shape",
    [
        (480, 640, 3, 0),
        (720, 1280, 3, 1),
        (37, 53, 4, 1),
        (224, 224, 3, 0),
        (100, 300, 1, 2),
        (1, 1, 3, 0),
        (225, 225, 3, 0),
    ],
)
def test_pixels_to_patches(shape: tuple[int, int, int, int]) -> None:
    raw = torch.randint(0, 256, (1280 * 720 * 4,), device=DEVICE, dtype=torch.uint8)
    layout = torch.tensor(shape, device=DEVICE, dtype=torch.int32)
    out, expected = poisoned(256, 592), torch.empty(256, 588)
    pixels.pixels_to_patches(raw.cpu(), layout.cpu(), patch=14, out=expected)
    kernels.pixels_to_patches(raw, layout, patch=14, out=out)
    assert (
        out[:, :588].float().cpu() - expected
    ).abs().max() <= 2**-8  # half a unit in the last place of a bfloat16 near 1
    assert not out[:, 588:].any()


def test_wrong_arguments_are_named() -> None:
    x, out = draw(4, 1152), poisoned(4, 1152)
    with pytest.raises(ShapeError, match="layer_norm: 'weight' dimension 0 'width' must be 1152"):
        kernels.layer_norm(x, draw(1024), draw(1152), eps=1e-6, out=out)
    with pytest.raises(KernelError, match="layer_norm: 'x' must be bfloat16"):
        kernels.layer_norm(x.float(), draw(1152), draw(1152), eps=1e-6, out=out)
    with pytest.raises(ShapeError, match="geglu: 'out' dimension 1 must be a multiple of 4096"):
        kernels.geglu(draw(4, 2048), out=poisoned(4, 1024))
