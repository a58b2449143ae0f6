"""Matrix products of a few hundred rows on Hopper's own matrix instructions, with the step behind them inside.

For the shapes of a prefix encoder cuBLASLt loses twice: its tiles of 128 rows waste a part of 712, and what stands
behind the product reads and writes everything once more. Operands are bfloat16 or E4M3 codes, and so is the result.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..shapes import ShapeError, check
from .boundary import demand_choices, demand_dense, demand_device
from .compiler import KernelSource
from .errors import KernelError
from .gemm_tiling import (
    GROUP,
    MOST_ROWS,
    STEP_BYTES,
    OutLayout,
    Sharing,
    Tiling,
    columns,
    inverse_of_divisor,
    shared_bytes,
    stages,
    tiling,
)
from .head_codes import HEAD_DIM, HEADS, HeadCodes
from .kernel import HOPPER, architecture, kernel
from .registers import demand_registers
from .rows import demand_heads
from .tensor_map import TensorMap, grouped_map, launch_with_maps, tensor_map

CODES = torch.float8_e4m3fn
PRODUCED_FOR = (2,)  # consumers that a warpgroup of its own fetches for
_REGISTERS = 168  # of a thread at its launch, where that warpgroup hands its own over: 2 * 232 + 40 are 3 * 168
_LOW_ROWS = 128  # up to which a tile needs few registers, and nothing is handed over
_ROW_BYTES = 16  # rows of every matrix start at multiples of these
_HEAD_CONSUMERS = 2  # whose tiles are halves of a head
_GROUP_THREADS, _ROWS_PER_RMS_BLOCK, _RMS_THREADS = 128, 8, 256
_CHOICES = ("TILE_ROWS", "STAGES", "CONSUMERS", "CHUNKS", "SHARE_X", "SHARE_WEIGHTS")


def unsuited(device: torch.device) -> str:
    """Why the products cannot run on `device`; empty if they can."""
    found = architecture(device)
    if found != HOPPER:
        return f"gemm.cu uses matrix instructions of {HOPPER}, this GPU is {found}"
    return ""


def inverse_rms_rows(x: Tensor, *, eps: float, out: Tensor, overlap: bool = False) -> None:
    """out float32[rows] = 1 / sqrt(mean(x²) + eps) of each row of x bf16[rows, width].

    With `overlap`, the next launch may begin before this one ends.
    """
    check("inverse_rms_rows", x=(x, "rows width"), out=(out, "rows"))
    demand_dense("inverse_rms_rows", torch.bfloat16, x=x)
    demand_dense("inverse_rms_rows", torch.float32, alignment=4, out=out)
    source = KernelSource("prefix", {"WIDTH": x.shape[1], "OVERLAP": int(overlap)})
    blocks = -(-x.shape[0] // _ROWS_PER_RMS_BLOCK)
    kernel(source, "inverse_rms_rows", x.device).launch(blocks, _RMS_THREADS, x, out, x.shape[0], eps)


@dataclass(frozen=True)
class Behind:
    """What follows the sums of a product: each is multiplied, then the bias is added, then the activation taken.

    Args:
        scale: float32[rows], a factor for each row of x; alone or with nothing else.
        factor: float32[outputs], a factor for each output.
        bias: bf16[outputs].
        gelu: take gelu_tanh.
        out_scale: float32[1]; the result is stored as E4M3 codes under this scale. Without an activation these are the
            codes of the values rounded to bfloat16. Behind gelu or GeGLU, which are in half precision then, they are
            those of the exact values or, about one in a hundred, their neighbours; what goes into gelu, or with GeGLU
            up, counts as 65504 scales where it is larger.
    """

    scale: Tensor | None = None
    factor: Tensor | None = None
    bias: Tensor | None = None
    gelu: bool = False
    out_scale: Tensor | None = None


NOTHING = Behind()


def gate_up_geglu(
    x: Tensor, weight: Tensor, *, out: Tensor, behind: Behind = NOTHING, overlap: bool = False,
    variant: Mapping[str, int] | None = None,
) -> None:  # fmt: skip
    """out = gelu_tanh(gate) * up of x @ weight.T, summed in float32 and rounded once.

    Args:
        x: bf16 or E4M3 codes (float8_e4m3fn) [rows, inputs]; rows in multiples of 16 bytes.
        weight: [2 * hidden, inputs] of the same type, all of gate, then all of up; `hidden` is a multiple of 8, and of
            16 if `out` holds codes.
        out: [rows, hidden], bf16 or codes.
        behind: what is done to gate and up in front of GeGLU; no `gelu`.
        overlap: begin beside the kernel in front of this one, which makes x and nothing else that is read here; or with
            `behind.scale` that alone, and then it lets this one begin only when all before it has ended.
        variant: other compile-time choices than the best known ones (TILE_ROWS, STAGES, CONSUMERS, CHUNKS, SHARE_X,
            SHARE_WEIGHTS): by sites that know better, and for whoever measures them.
    """
    check(
        "gate_up_geglu", x=(x, "rows inputs"), out=(out, "rows hidden"), weight=(weight, (2 * out.shape[1], "inputs"))
    )
    if behind.gelu:
        raise KernelError("gate_up_geglu: 'gelu' is in it already")
    _launch("gate_up_geglu", x, weight, out, behind, overlap, variant or {}, geglu=True)


def product(
    x: Tensor, weight: Tensor, *, out: Tensor, behind: Behind = NOTHING, overlap: bool = False,
    variant: Mapping[str, int] | None = None,
) -> None:  # fmt: skip
    """out = x @ weight.T and what is `behind` it, summed in float32 and rounded once.

    Args:
        x, overlap, variant: those of `gate_up_geglu`.
        weight: [outputs, inputs] of x's type; `outputs` is a multiple of 8, and of 16 if `out` holds codes.
        out: bf16 or codes [rows, outputs]. Or bf16[parts, part rows, outputs]: as many parts of K, whose sum is the
            result, each with `parts_rows` rows; nothing of `behind` but `factor` and `bias` goes with that.
    """
    outputs = out.shape[-1]
    check("product", x=(x, "rows inputs"), weight=(weight, (outputs, "inputs")))
    if out.ndim == 2:
        check("product", x=(x, "rows inputs"), out=(out, ("rows", outputs)))
    _launch("product", x, weight, out, behind, overlap, variant or {})


@dataclass(frozen=True)
class Heads:
    """Where queries, keys and values go, and what the former two are rotated by.

    Args:
        rope: bf16[rows, 256], cosines then sines.
        query: bf16[rows, 8, 256]; rows may be further apart. None where only keys and values are needed, or codes.
        key, value: bf16[rows, 1, 256].
        codes: of queries instead of `query`, of keys and values too; those of the bfloat16. None for none.
    """

    rope: Tensor
    query: Tensor | None
    key: Tensor
    value: Tensor
    codes: HeadCodes | None = None


def rotated_qkv(
    x: Tensor, weight: Tensor, heads: Heads, *, behind: Behind = NOTHING, overlap: bool = False,
    variant: Mapping[str, int] | None = None,
) -> None:  # fmt: skip
    """Queries, keys and values of x @ weight.T, the former two rotated, summed in float32 and rounded once.

    What `product` and then `rows.split_rope_write` give, which round twice.

    Args:
        x, overlap, variant: those of `gate_up_geglu`; three consumers are refused.
        weight: [outputs, inputs] of x's type: heads of 256 rows, those of queries, of keys, of values.
        behind: what is done before they are rotated: `factor` and `bias` only.
    """
    op, query, rows = "rotated_qkv", heads.query, x.shape[0]
    outputs = HEAD_DIM * (2 + (0 if query is None and heads.codes is None else HEADS))
    check(op, x=(x, "rows inputs"), weight=(weight, (outputs, "inputs")), rope=(heads.rope, ("rows", HEAD_DIM)),
          key=(heads.key, ("rows", 1, HEAD_DIM)), value=(heads.value, ("rows", 1, HEAD_DIM)))  # fmt: skip
    demand_dense(op, torch.bfloat16, rope=heads.rope, key=heads.key, value=heads.value)
    if query is not None:
        demand_heads(op, query, rows)
    if heads.codes is not None:
        heads.codes.demand(op, rows, x.device)
        if query is not None:
            raise KernelError(f"{op}: queries become bfloat16 or codes; give 'query' or 'codes'")
    for name in ("rope", "query", "key", "value"):
        if getattr(heads, name) is not None:
            demand_device(f"{op}: '{name}'", getattr(heads, name), x.device)
    if behind.scale is not None or behind.gelu or behind.out_scale is not None:
        raise KernelError(f"{op}: nothing of 'behind' but a factor and a bias goes in front of the rotation")
    variant = {"CONSUMERS": _HEAD_CONSUMERS, **(variant or {})}
    if variant["CONSUMERS"] != _HEAD_CONSUMERS:
        raise KernelError(f"{op}: CONSUMERS must be {_HEAD_CONSUMERS}, whose tiles are halves of a head")
    out = (heads.key if query is None else query).flatten(1)
    _launch(op, x, weight, out, behind, overlap, variant, heads=heads)


def parts_rows(
    rows: int, outputs: int, parts: int, device: torch.device, variant: Mapping[str, int] | None = None
) -> int:
    """Rows that each of several parts needs in the result of `product`: whole tiles."""
    tile = _tiling(rows, outputs, parts, device, variant or {}).rows
    return -(-rows // tile) * tile


def _launch(
    op: str, x: Tensor, weight: Tensor, out: Tensor, behind: Behind, overlap: bool, variant: Mapping[str, int],
    *, geglu: bool = False, heads: Heads | None = None,
) -> None:  # fmt: skip
    to_codes, parts = behind.out_scale is not None, out.shape[0] if out.ndim == 3 else 1
    _check_types(op, x, weight, out, behind)
    demand_choices(op, variant, _CHOICES)
    if variant.get("CONSUMERS") not in (None, *MOST_ROWS):
        raise KernelError(f"{op}: CONSUMERS must be one of {tuple(MOST_ROWS)}, got {variant['CONSUMERS']}")
    reason = unsuited(x.device)
    if reason:
        raise KernelError(f"{op}: {reason}")
    step, (rows, inputs), outputs = STEP_BYTES // x.element_size(), x.shape, weight.shape[0]
    if outputs % (GROUP * (1 + geglu)):
        raise ShapeError(f"{op}: 'weight' dimension 0 must be a multiple of {GROUP * (1 + geglu)}, got {outputs}")
    steps = -(-inputs // step)
    if not 0 < parts <= steps:
        raise ShapeError(f"{op}: {inputs} inputs are {steps} steps, which make no {parts} parts")
    cut = _tiling(rows, outputs, parts, x.device, variant)
    if x.dtype == CODES:
        best = Sharing.best(cut, rows, outputs, parts, inputs, _processors(x.device))
        variant = {"SHARE_X": best.x, "SHARE_WEIGHTS": best.weights, **variant}
    source = _source(cut, x, behind, overlap, {**variant, "GEGLU": int(geglu), "PARTS": parts, **_head_choices(heads)})
    tile, consumers, layout = cut.rows, cut.consumers, OutLayout.of(source.defines)
    row_tiles, column_tiles = -(-rows // tile), -(-outputs // columns(consumers))
    sharing = Sharing.of(source.defines)
    blocks = sharing.blocks(row_tiles, column_tiles, parts, _processors(x.device))
    inverse = inverse_of_divisor(-(-row_tiles // sharing.weights), -(-column_tiles // sharing.x) * parts)
    nbytes = shared_bytes(source.defines)
    target = out.flatten(0, 1) if out.ndim == 3 else out
    part_rows = 0 if out.ndim == 2 else out.shape[1]
    if out.ndim == 3 and part_rows < row_tiles * tile:
        raise ShapeError(f"{op}: each part needs {row_tiles * tile} rows of 'out', got {part_rows}")
    registers = handed_over(source)
    if registers is not None:
        demand_registers(source, HOPPER, registers)
    launch_with_maps(
        int(kernel(source, "gemm", x.device, nbytes).driver_kernel.handle),
        torch.cuda.current_stream(x.device).cuda_stream,
        blocks,
        _GROUP_THREADS * (consumers + (consumers in PRODUCED_FOR)),
        nbytes,
        (
            _weight_map(weight, consumers, step, outputs // 2 if geglu else HEAD_DIM // 2 if heads else 0, sharing),
            tensor_map(x, (sharing.rows(tile), step), STEP_BYTES),
            # Codes are stored without the engine: this map is then no more than valid.
            tensor_map(x, (tile, _ROW_BYTES), 0) if to_codes else tensor_map(target, layout.box, layout.line_bytes),
            *(_head_maps(heads, tile, layout) if heads else ()),
            *(_head_codes(heads.codes) if heads and heads.codes else ()),
            *(_pointer(t) for t in (behind.scale, behind.factor, behind.bias, behind.out_scale)),
            _pointer(out if to_codes else None),
            *(ctypes.c_uint(value) for value in (rows, outputs, column_tiles, inverse, steps, part_rows)),
        ),
        overlap=overlap,
    )


def _weight_map(weight: Tensor, consumers: int, step: int, apart: int, sharing: Sharing) -> TensorMap:
    """What a block fetches of a stage of weights is a box; `apart`: rows between those that one thread needs side by
    side, 0 for none."""
    groups = columns(consumers) // GROUP // (2 if apart else 1)
    return grouped_map(weight, sharing.groups(groups), step, apart=apart)


def _head_maps(heads: Heads, tile: int, layout: OutLayout) -> tuple[TensorMap, ...]:
    """Of keys, of values, and of the table: a slot of the ring holds cosines or sines of a tile's pairs."""
    made = (tensor_map(tensor.flatten(1), layout.box, layout.line_bytes) for tensor in (heads.key, heads.value))
    return *made, tensor_map(heads.rope, (tile, STEP_BYTES // heads.rope.element_size()), STEP_BYTES)


def _head_choices(heads: Heads | None) -> dict[str, int]:
    return {"ROTARY": int(heads is not None), "HEAD_CODES": int(heads is not None and heads.codes is not None)}


def _head_codes(codes: HeadCodes) -> tuple[ctypes.c_void_p, ...]:
    return tuple(map(_pointer, (codes.query, codes.key, codes.value, codes.scales)))


def _source(cut: Tiling, x: Tensor, behind: Behind, overlap: bool, variant: Mapping[str, int]) -> KernelSource:
    """The kernel for a product that is cut so: the best known choices where `variant` makes none."""
    chosen = {
        **variant, "TILE_ROWS": cut.rows, "CONSUMERS": cut.consumers, "FP8": int(x.dtype == CODES),
        "OVERLAP": int(overlap), "ROW_SCALE": int(behind.scale is not None), "GELU": int(behind.gelu),
        "OUT8": int(behind.out_scale is not None),
    }  # fmt: skip
    return product_source({"STAGES": stages(chosen), **chosen})


def handed_over(source: KernelSource) -> int | None:
    """Registers that a launch has to give to each thread, because warps hand over some of them; None if none do."""
    hands_over = source.defines["CONSUMERS"] in PRODUCED_FOR and source.defines["TILE_ROWS"] > _LOW_ROWS
    return _REGISTERS if hands_over else None


def _check_types(op: str, x: Tensor, weight: Tensor, out: Tensor, behind: Behind) -> None:
    rows, outputs = x.shape[0], weight.shape[0]
    _typed(op, CODES if x.dtype == CODES else torch.bfloat16, x=x, weight=weight)
    _typed(op, torch.bfloat16 if behind.out_scale is None else CODES, out=out)
    wanted = {"scale": (rows,), "factor": (outputs,), "bias": (outputs,), "out_scale": (1,)}
    given = {name: getattr(behind, name) for name in wanted if getattr(behind, name) is not None}
    check(op, **{name: (tensor, wanted[name]) for name, tensor in given.items()})
    for name, tensor in {"weight": weight, "out": out, **given}.items():
        demand_device(f"{op}: '{name}'", tensor, x.device)
    for name, tensor in given.items():
        _typed(op, torch.bfloat16 if name == "bias" else torch.float32, **{name: tensor})
    if behind.scale is not None and (behind.gelu or "factor" in given or "bias" in given):
        raise KernelError(f"{op}: a factor for each row goes with no factor, bias or gelu")
    if not out.is_contiguous() and (out.ndim == 3 or out.dtype == CODES):
        raise KernelError(f"{op}: 'out' must be contiguous, got strides {out.stride()}")
    if out.ndim == 3 and (behind.gelu or behind.out_scale is not None or behind.scale is not None):
        raise KernelError(f"{op}: parts of K are added by who reads them, so that nothing but a factor goes before")
    if out.dtype == CODES and out.data_ptr() % _ROW_BYTES:
        raise KernelError(f"{op}: 'out' must begin at a multiple of {_ROW_BYTES} bytes, got {out.data_ptr():#x}")
    if out.dtype == CODES and out.shape[-1] % _ROW_BYTES:
        raise ShapeError(f"{op}: 'out' holds codes in rows of multiples of {_ROW_BYTES}, got {out.shape[-1]}")


@lru_cache(maxsize=8)
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _tiling(rows: int, outputs: int, parts: int, device: torch.device, variant: Mapping[str, int]) -> Tiling:
    named = variant.get("CONSUMERS"), variant.get("TILE_ROWS")
    return tiling(rows, outputs, parts, _processors(device), *named)


def _pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def product_source(defines: Mapping[str, int]) -> KernelSource:
    """The kernel with the usual choices, and `defines` in their place; TILE_ROWS has to be among them."""
    usual = {
        "STAGES": 4, "CONSUMERS": 2, "GEGLU": 0, "GELU": 0, "OUT8": 0, "ROW_SCALE": 0, "ROTARY": 0,
        "HEAD_CODES": 0, "FP8": 0, "OVERLAP": 0, "SHARE_X": 1, "SHARE_WEIGHTS": 1, "PARTS": 1,
    }  # fmt: skip
    return KernelSource("gemm", {**usual, **defines})


def _typed(op: str, dtype: torch.dtype, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype != dtype or tensor.stride(-1) != 1:
            raise KernelError(
                f"{op}: '{name}' must be {dtype} with contiguous rows, got {tensor.dtype}, strides {tensor.stride()}"
            )
