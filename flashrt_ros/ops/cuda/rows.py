"""Launchers of the kernels that work on rows: pixels, norms, rotary embedding, GeGLU.

Every function computes what the reference of the same name in `flashrt_ros.ops` defines, for bfloat16 on a GPU, except
where its docstring adds something. `overlap` launches with programmatic overlap and changes no bit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..shapes import ShapeError, check
from .compiler import KernelSource
from .errors import KernelError
from .kernel import kernel

_NORM_ROWS, _NORM_THREADS, _THREADS = 4, 128, 256
_GEGLU_SLICE = 4096  # hidden values that one block writes


def pixels_to_patches(pixels: Tensor, pixel_format: Tensor, *, patch: int, out: Tensor, overlap: bool = False) -> None:
    """See the reference; `out` may have longer rows than a patch needs, their ends become zero."""
    check(
        "pixels_to_patches",
        pixels=(pixels, "capacity"),
        pixel_format=(pixel_format, "4"),
        out=(out, "patches width"),
    )
    grid = math.isqrt(out.shape[0])
    if grid * grid != out.shape[0] or out.shape[1] < 3 * patch * patch:
        raise ShapeError(
            f"pixels_to_patches: 'out' must be [a square number, at least {3 * patch * patch}], got {list(out.shape)}"
        )
    _bfloat16("pixels_to_patches", out=out)
    source = _source("pixels", overlap, GRID=grid, PATCH=patch, LEADING=out.shape[1])
    kernel(source, "pixels_to_patches", out.device).launch(
        out.shape[0], _THREADS, pixels, pixel_format, out, pixels.numel(), overlap=overlap
    )


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, *, eps: float, out: Tensor, branch: Tensor | None = None,
    overlap: bool = False,
) -> None:  # fmt: skip
    """See the reference. With `branch` bf16[rows, width], x += branch first, in place."""
    check("layer_norm", x=(x, "rows width"), weight=(weight, "width"), bias=(bias, "width"), out=(out, "rows width"))
    _bfloat16("layer_norm", x=x, weight=weight, bias=bias, out=out)
    _norm("layer_norm", x, overlap, x, branch, weight, bias, out, x.shape[0], eps)


def residual_rms_norm(
    residual: Tensor, branch: Tensor | None, *, eps: float, out: Tensor, overlap: bool = False
) -> None:
    """See the reference."""
    check("residual_rms_norm", residual=(residual, "rows width"), out=(out, "rows width"))
    _bfloat16("residual_rms_norm", residual=residual, out=out)
    _norm("residual_rms_norm", residual, overlap, residual, branch, out, residual.shape[0], eps)


def gated_residual_ada_rms_norm(
    residual: Tensor, branch: Tensor | None, gate: Tensor | None, modulation: Tensor, *, eps: float, out: Tensor,
    overlap: bool = False,
) -> None:  # fmt: skip
    """See the reference."""
    op = "gated_residual_ada_rms_norm"
    check(op, residual=(residual, "rows width"), modulation=(modulation, "3 width"), out=(out, "rows width"))
    _bfloat16(op, residual=residual, out=out)
    _norm(op, residual, overlap, residual, branch, gate, modulation, out, residual.shape[0], eps)


def split_rope_write(
    qkv: Tensor, rope: Tensor, *, query: Tensor | None, key: Tensor, value: Tensor, residual: Tensor | None = None,
    eps: float = 0.0, overlap: bool = False,
) -> None:  # fmt: skip
    """See the reference, for eight query heads and one key head of 256. `query` may lie in `qkv` itself.

    With `residual` bf16[rows, width], qkv is the product of residual rows that were not normalised, and each row is
    divided by the root mean square of its residual here.
    """
    rows, queries = key.shape[0], 0 if query is None else query.shape[1]
    width = _width(residual)
    check(
        "split_rope_write",
        key=(key, "rows 1 256"),
        value=(value, "rows 1 256"),
        rope=(rope, "rows 256"),
        qkv=(qkv, ("rows", (queries + 2) * 256)),
    )
    if queries not in (0, 8):
        raise ShapeError(f"split_rope_write: 'query' must have 8 heads, got {queries}")
    _bfloat16("split_rope_write", qkv=qkv, rope=rope, key=key, value=value)
    source = _source("prefix", overlap, WIDTH=width, HEADS=8, HEAD_DIM=256, WITH_QUERY=int(query is not None))
    kernel(source, "split_rope_write", qkv.device).launch(
        rows, _THREADS, residual, qkv, rope, query, key, value, 0 if query is None else query.stride(0), eps,
        overlap=overlap,
    )  # fmt: skip


def geglu(
    gate_up: Tensor, *, out: Tensor, residual: Tensor | None = None, eps: float = 0.0, overlap: bool = False
) -> None:
    """See the reference. `residual` and `eps` as in `split_rope_write`."""
    rows, hidden = out.shape
    check("geglu", gate_up=(gate_up, ("rows", 2 * hidden)), out=(out, "rows hidden"))
    _bfloat16("geglu", gate_up=gate_up, out=out)
    if hidden % _GEGLU_SLICE:
        raise ShapeError(f"geglu: 'out' dimension 1 must be a multiple of {_GEGLU_SLICE}, got {hidden}")
    source = _source("prefix", overlap, WIDTH=_width(residual), HIDDEN=hidden)
    kernel(source, "geglu", out.device).launch(
        (rows, hidden // _GEGLU_SLICE), _THREADS, residual, gate_up, out, eps, overlap=overlap
    )


def _norm(function: str, rows: Tensor, overlap: bool, *arguments: Tensor | int | float | None) -> None:
    if rows.shape[1] % 128:
        raise ShapeError(f"{function}: the width must be a multiple of 128, got {rows.shape[1]}")
    blocks = -(-rows.shape[0] // _NORM_ROWS)
    kernel(_source("norms", overlap, COLS=rows.shape[1]), function, rows.device).launch(
        blocks, _NORM_THREADS, *arguments, overlap=overlap
    )


def _source(name: str, overlap: bool, **sizes: int) -> KernelSource:
    return KernelSource(name, {**sizes, "OVERLAP": int(overlap)})


def _width(residual: Tensor | None) -> int:
    return 2048 if residual is None else residual.shape[1]


def _bfloat16(op: str, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype != torch.bfloat16 or tensor.stride(-1) != 1:
            raise KernelError(
                f"{op}: '{name}' must be bfloat16 with contiguous rows, got {tensor.dtype}, strides {tensor.stride()}"
            )
