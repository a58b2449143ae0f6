"""Launchers of the kernels that work on rows: pixels, norms, rotary embedding, GeGLU, quantisation and its inverse.

Every function computes what the reference of the same name in `flashrt_ros.ops` defines, for bfloat16 on a GPU, except
where its docstring adds something. Rows lie one behind the other in memory; other layouts and types are a KernelError.
`overlap` launches with programmatic overlap and changes no bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..shapes import ShapeError, check
from .boundary import demand_dense
from .compiler import KernelSource
from .errors import KernelError
from .kernel import kernel

CODES = torch.float8_e4m3fn
_THREADS, _WARP = 256, 32
_GEGLU_SLICE = 4096  # hidden values that one block writes
_QUANTISE_THREADS, _QUANTISED_VALUES = 128, 16  # of a block; that a thread converts
_BLOCK = 16  # values of NVFP4 under one scale
_NORM_GROUP = 128  # values of a row that a warp reads at once
_MOST_ROW_WARPS = 8


@dataclass(frozen=True)
class Quantiser:
    """How a result becomes E4M3 codes: as `flashrt_ros.precision` quantises a bfloat16 input.

    Args:
        scale: float32[1].
        multiplier: float32[width] in front of it; None for none.
    """

    scale: Tensor
    multiplier: Tensor | None = None


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
    demand_dense("pixels_to_patches", torch.uint8, alignment=1, pixels=pixels)
    demand_dense("pixels_to_patches", torch.int32, alignment=4, pixel_format=pixel_format)
    demand_dense("pixels_to_patches", torch.bfloat16, out=out)
    source = _source("pixels", overlap, GRID=grid, PATCH=patch, LEADING=out.shape[1])
    kernel(source, "pixels_to_patches", out.device).launch(
        out.shape[0], _THREADS, pixels, pixel_format, out, pixels.numel(), overlap=overlap
    )


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, *, eps: float, out: Tensor, branch: Tensor | None = None,
    quantiser: Quantiser | None = None, overlap: bool = False,
) -> None:  # fmt: skip
    """See the reference. With `branch`, x += branch first, in place.

    Args:
        branch: bf16[rows, width], or bf16[parts, at least rows, width] whose parts are added.
        quantiser: `out` is codes (float8_e4m3fn) of what it would have been; None for bf16.
    """
    check("layer_norm", x=(x, "rows width"), weight=(weight, "width"), bias=(bias, "width"), out=(out, "rows width"))
    demand_dense("layer_norm", torch.bfloat16, x=x, weight=weight, bias=bias)
    _norm("layer_norm", x, (weight, bias), branch, out, quantiser, eps, overlap)


def residual_rms_norm(
    residual: Tensor, branch: Tensor | None, *, eps: float, out: Tensor, quantiser: Quantiser | None = None,
    overlap: bool = False,
) -> None:  # fmt: skip
    """See the reference; `branch` and `quantiser` as in `layer_norm`."""
    check("residual_rms_norm", residual=(residual, "rows width"), out=(out, "rows width"))
    demand_dense("residual_rms_norm", torch.bfloat16, residual=residual)
    _norm("residual_rms_norm", residual, (), branch, out, quantiser, eps, overlap)


def quantise(x: Tensor, quantiser: Quantiser, *, out: Tensor, overlap: bool = False) -> None:
    """out = codes (float8_e4m3fn) of x bf16[rows, width], both contiguous; `quantiser` has no multiplier."""
    check("quantise", x=(x, "rows width"), out=(out, "rows width"))
    scale = lone_scale("quantise", quantiser)
    demand_dense("quantise", torch.bfloat16, x=x)
    demand_dense("quantise", CODES, out=out)
    if x.numel() % _QUANTISED_VALUES:
        raise ShapeError(f"quantise: 'x' must have a multiple of {_QUANTISED_VALUES} values, got {x.numel()}")
    groups = x.numel() // _QUANTISED_VALUES
    kernel(_source("quantise", overlap), "quantise", x.device).launch(
        -(-groups // _QUANTISE_THREADS), _QUANTISE_THREADS, x, scale, out, groups, overlap=overlap
    )


def decode_nvfp4(codes: Tensor, scales: Tensor, *, out: Tensor) -> None:
    """out = what NVFP4 codes stand for, without the scale of their tensor; exact.

    Args:
        codes: uint8[rows, 8 * blocks], two a byte, contiguous.
        scales: uint8[rows, blocks], codes of E4M3 without sign, contiguous.
        out: bf16[rows, 16 * blocks], contiguous.
    """
    rows, blocks = scales.shape
    check("decode_nvfp4", scales=(scales, (rows, blocks)), codes=(codes, (rows, blocks * _BLOCK // 2)),
          out=(out, (rows, blocks * _BLOCK)))  # fmt: skip
    demand_dense("decode_nvfp4", torch.bfloat16, out=out)
    demand_dense("decode_nvfp4", torch.uint8, alignment=_BLOCK // 2, codes=codes)
    demand_dense("decode_nvfp4", torch.uint8, alignment=1, scales=scales)
    kernel(_source("quantise", False), "decode_nvfp4", out.device).launch(
        -(-rows * blocks // _QUANTISE_THREADS), _QUANTISE_THREADS, codes, scales, out, rows * blocks
    )


def gated_residual_ada_rms_norm(
    residual: Tensor, branch: Tensor | None, gate: Tensor | None, modulation: Tensor, *, eps: float, out: Tensor,
    overlap: bool = False,
) -> None:  # fmt: skip
    """See the reference."""
    op = "gated_residual_ada_rms_norm"
    check(op, residual=(residual, "rows width"), modulation=(modulation, "3 width"), out=(out, "rows width"))
    demand_dense(op, torch.bfloat16, residual=residual, out=out)
    demand_dense(op, torch.float32, alignment=4, modulation=modulation)
    if (branch is None) != (gate is None):
        raise KernelError(
            f"{op}: 'branch' and 'gate' come together, got only '{'gate' if branch is None else 'branch'}'"
        )
    if branch is not None and gate is not None:
        check(op, residual=(residual, "rows width"), branch=(branch, "rows width"), gate=(gate, "width"))
        demand_dense(op, torch.bfloat16, branch=branch)
        demand_dense(op, torch.float32, alignment=4, gate=gate)
    _launch_norm(op, residual, overlap, {}, residual, branch, gate, modulation, out, eps)


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
    demand_dense("split_rope_write", torch.bfloat16, qkv=qkv, rope=rope, key=key, value=value)
    _demand_residual("split_rope_write", residual, rows)
    if query is not None:
        demand_heads("split_rope_write", query, rows)
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
    demand_dense("geglu", torch.bfloat16, gate_up=gate_up, out=out)
    _demand_residual("geglu", residual, rows)
    if hidden % _GEGLU_SLICE:
        raise ShapeError(f"geglu: 'out' dimension 1 must be a multiple of {_GEGLU_SLICE}, got {hidden}")
    source = _source("prefix", overlap, WIDTH=_width(residual), HIDDEN=hidden)
    kernel(source, "geglu", out.device).launch(
        (rows, hidden // _GEGLU_SLICE), _THREADS, residual, gate_up, out, eps, overlap=overlap
    )


def _norm(
    function: str, rows: Tensor, table: tuple[Tensor, ...], branch: Tensor | None, out: Tensor,
    quantiser: Quantiser | None, eps: float, overlap: bool,
) -> None:  # fmt: skip
    """A norm in front of which a branch may be added, and behind which may be quantised."""
    count, width = rows.shape
    parts, part_rows = _parts(function, branch, count, width)
    demand_dense(function, torch.bfloat16 if quantiser is None else CODES, out=out)
    scale = multiplier = None
    if quantiser is not None:
        scale, multiplier = quantiser.scale, quantiser.multiplier
        check(function, scale=(scale, "1"))
        demand_dense(function, torch.float32, alignment=4, scale=scale)
    if multiplier is not None:
        check(function, multiplier=(multiplier, (width,)))
        demand_dense(function, torch.float32, multiplier=multiplier)
    choices = {"QUANTISED": int(quantiser is not None), "MULTIPLIED": int(multiplier is not None), "PARTS": parts}
    _launch_norm(
        function, rows, overlap, choices, rows, branch, *table, out, scale, multiplier, part_rows, eps
    )  # fmt: skip


def _parts(function: str, branch: Tensor | None, rows: int, width: int) -> tuple[int, int]:
    """How many parts a branch has, and how many rows each."""
    if branch is None:
        return 0, 0
    demand_dense(function, torch.bfloat16, branch=branch)
    if branch.ndim == 2:
        check(function, branch=(branch, (rows, width)))
        return 1, rows
    parts, part_rows = branch.shape[0], branch.shape[1]
    check(function, branch=(branch, (parts, part_rows, width)))
    if part_rows < rows:
        raise ShapeError(f"{function}: 'branch' must have at least {rows} rows a part, got {list(branch.shape)}")
    return parts, part_rows


def _launch_norm(
    function: str, rows: Tensor, overlap: bool, choices: Mapping[str, int], *arguments: Tensor | int | float | None
) -> None:
    count, width = rows.shape
    if width % _NORM_GROUP:
        raise ShapeError(f"{function}: the width must be a multiple of {_NORM_GROUP}, got {width}")
    warps = row_warps(width)
    kernel(_source("norms", overlap, COLS=width, ROW_WARPS=warps, **choices), function, rows.device).launch(
        count, warps * _WARP, *arguments, overlap=overlap
    )


def row_warps(width: int) -> int:
    """Warps that share a row in a norm: as many as come out even with two groups of values or more for each."""
    groups = width // _NORM_GROUP
    return max(n for n in range(1, _MOST_ROW_WARPS + 1) if groups % n == 0 and (n == 1 or groups // n > 1))


def _source(name: str, overlap: bool, **sizes: int) -> KernelSource:
    return KernelSource(name, {**sizes, "OVERLAP": int(overlap)})


def _width(residual: Tensor | None) -> int:
    return 2048 if residual is None else residual.shape[1]


def _demand_residual(op: str, residual: Tensor | None, rows: int) -> None:
    """The residual in front of a product, if the norm of its rows is applied behind it."""
    if residual is not None:
        check(op, residual=(residual, (rows, "width")))
        demand_dense(op, torch.bfloat16, residual=residual)


def lone_scale(op: str, quantiser: Quantiser) -> Tensor:
    """The scale of a quantiser for what no norm gives; KernelError if it has a multiplier, or memory that `op` cannot
    read."""
    if quantiser.multiplier is not None:
        raise KernelError(
            f"{op}: 'quantiser' must have no multiplier, which is for what a norm gives; give one of a scale alone"
        )
    check(op, scale=(quantiser.scale, "1"))
    demand_dense(op, torch.float32, alignment=4, scale=quantiser.scale)
    return quantiser.scale


def demand_heads(op: str, query: Tensor, rows: int) -> None:
    """KernelError unless the eight heads of a row lie one behind the other; rows may be further apart, as in a wider
    product."""
    check(op, query=(query, (rows, 8, 256)))
    demand_dense(op, torch.bfloat16, query=query[:1])
    if query.stride(0) % 8 or (rows > 1 and query.stride(0) < 8 * 256):
        raise KernelError(
            f"{op}: 'query' must have rows at least 2048 values apart, by multiples of 8, got {query.stride(0)}; give "
            "its contiguous()"
        )
