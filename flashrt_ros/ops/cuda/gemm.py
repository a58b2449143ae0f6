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
from .kernel import architecture, kernel
from .tensor_map import grouped_map, launch_with_maps, tensor_map

ARCHITECTURE = "sm_90a"
CODES = torch.float8_e4m3fn
_COLUMNS, _CONSUMERS = 128, 2  # weight rows of a tile, which so many warpgroups share
_STEP_BYTES = 128  # of a row of x or of the weights, in one stage
_ROW_BYTES = 16  # rows of every matrix start at multiples of these
_GROUP = 8  # rows of an instruction's tile
_THREADS, _ROWS_PER_RMS_BLOCK, _RMS_THREADS = 384, 8, 256
_TILE_OVERHEAD = 16  # what a tile costs beside its products, in rows
_TILE_COUNTS = 6  # numbers of tiles that are considered; lower tiles fetch each weight too often
_SHARED_BYTES = 232448  # that a block may have
_MOST_STAGES = 8
_CHOICES = ("TILE_ROWS", "STAGES")


def unsuited(device: torch.device) -> str:
    """Why the products cannot run on `device`; empty if they can."""
    found = architecture(device)
    if found != ARCHITECTURE:
        return f"gemm.cu uses matrix instructions of {ARCHITECTURE}, this GPU is {found}"
    return ""


@lru_cache(maxsize=64)
def tile_rows(rows: int, units: int, processors: int) -> int:
    """Rows of x that a tile should hold so that all tiles, dealt in waves to all multiprocessors, end soonest.

    Args:
        rows: of x.
        units: tiles of outputs, times the parts that K is cut into.
        processors: of the GPU.
    """
    smallest = -(-rows // 256)
    choices = [_GROUP * -(-rows // (_GROUP * count)) for count in range(smallest, smallest + _TILE_COUNTS)]

    def cost(tile: int) -> int:
        waves = -(-(-(-rows // tile) * units) // processors)
        return waves * (tile + _TILE_OVERHEAD)

    return min(choices, key=cost)


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
        out_scale: float32[1]; the result is stored as E4M3 codes of bfloat16 values under this scale.
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
        variant: other compile-time choices than the best known ones (TILE_ROWS, STAGES), for whoever measures them.
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


def parts_rows(rows: int, outputs: int, parts: int, device: torch.device, variant: Mapping[str, int]) -> int:
    """Rows that each of several parts needs in the result of `product`: whole tiles."""
    tile = _tile(rows, -(-outputs // _COLUMNS) * parts, device, variant)
    return -(-rows // tile) * tile


def _launch(
    op: str, x: Tensor, weight: Tensor, out: Tensor, behind: Behind, overlap: bool, variant: Mapping[str, int],
    *, geglu: bool = False,
) -> None:  # fmt: skip
    to_codes, parts = behind.out_scale is not None, out.shape[0] if out.ndim == 3 else 1
    _check_types(op, x, weight, out, behind)
    demand_choices(op, variant, _CHOICES)
    reason = unsuited(x.device)
    if reason:
        raise KernelError(f"{op}: {reason}")
    if weight.shape[0] % (_GROUP * (1 + geglu)):
        raise ShapeError(
            f"{op}: 'weight' dimension 0 must be a multiple of {_GROUP * (1 + geglu)}, got {weight.shape[0]}"
        )
    step, (rows, inputs), outputs = _STEP_BYTES // x.element_size(), x.shape, weight.shape[0]
    steps, column_tiles = -(-inputs // step), -(-outputs // _COLUMNS)
    if not 0 < parts <= steps:
        raise ShapeError(f"{op}: {inputs} inputs are {steps} steps, which make no {parts} parts")
    tile = _tile(rows, column_tiles * parts, x.device, variant)
    source = _source(tile, x, behind, overlap, {**variant, "GEGLU": int(geglu)})
    layout = OutLayout.of(tile, source.defines)
    nbytes = shared_bytes(tile, source.defines["STAGES"], layout)
    target = out.flatten(0, 1) if out.ndim == 3 else out
    part_rows = 0 if out.ndim == 2 else out.shape[1]
    if out.ndim == 3 and part_rows < -(-rows // tile) * tile:
        raise ShapeError(f"{op}: each part needs {-(-rows // tile) * tile} rows of 'out', got {part_rows}")
    units = -(-rows // tile) * column_tiles * parts
    launch_with_maps(
        int(kernel(source, "gemm", x.device, nbytes).driver_kernel.handle),
        torch.cuda.current_stream(x.device).cuda_stream,
        min(_processors(x.device), units),
        _THREADS,
        nbytes,
        (
            grouped_map(weight, _COLUMNS // _GROUP // (1 + geglu), step, pairs=geglu),
            tensor_map(x, (tile, step), _STEP_BYTES),
            # Codes are stored without the engine: this map is then no more than valid.
            tensor_map(x, (tile, _ROW_BYTES), 0) if to_codes else tensor_map(target, layout.box, layout.line_bytes),
            *(_pointer(t) for t in (behind.scale, behind.factor, behind.bias, behind.out_scale)),
            _pointer(out if to_codes else None),
            *(ctypes.c_int(value) for value in (rows, outputs, column_tiles, steps, parts, part_rows)),
        ),
        overlap=overlap,
    )


def _source(tile: int, x: Tensor, behind: Behind, overlap: bool, variant: Mapping[str, int]) -> KernelSource:
    """The kernel for tiles of so many rows: the best known choices where `variant` makes none."""
    chosen = {
        **variant, "TILE_ROWS": tile, "FP8": int(x.dtype == CODES), "OVERLAP": int(overlap),
        "ROW_SCALE": int(behind.scale is not None), "GELU": int(behind.gelu),
        "OUT8": int(behind.out_scale is not None),
    }  # fmt: skip
    return product_source({"STAGES": stages(tile, OutLayout.of(tile, chosen)), **chosen})


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


def _tile(rows: int, units: int, device: torch.device, variant: Mapping[str, int]) -> int:
    return variant.get("TILE_ROWS") or tile_rows(rows, units, _processors(device))


def _pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def product_source(defines: Mapping[str, int]) -> KernelSource:
    """The kernel with the usual choices, and `defines` in their place; TILE_ROWS has to be among them."""
    usual = {"STAGES": 4, "GEGLU": 0, "GELU": 0, "OUT8": 0, "ROW_SCALE": 0, "FP8": 0, "OVERLAP": 0}
    return KernelSource("gemm", {**usual, **defines})


@dataclass(frozen=True)
class OutLayout:
    """How a consumer stages its output, see kernels/gemm_epilogue.cuh.

    Attributes:
        box: rows and columns that one copy stores.
        line_bytes: of one staged row.
        nbytes: shared memory for it.
    """

    box: tuple[int, int]
    line_bytes: int
    nbytes: int

    @classmethod
    def of(cls, tile: int, defines: Mapping[str, int]) -> OutLayout:
        """The layout for tiles of so many rows, by the kernel's compile-time choices."""
        matrices, codes = tile // _GROUP, defines.get("OUT8", 0)
        chunks = 1 if codes or matrices == 1 else 2
        columns = _COLUMNS // _CONSUMERS // (1 + defines.get("GEGLU", 0))
        largest = -(-matrices // chunks)
        lines = _GROUP * (-(-matrices // 2) if codes else largest)
        box_rows = _GROUP * (largest if matrices % chunks == 0 else 1)
        return cls((box_rows, columns), 2 * columns, lines * 2 * columns)


def stages(tile: int, layout: OutLayout) -> int:
    """Stages of the ring: as many as there is memory for, up to where more gain nothing."""
    return max(n for n in range(2, _MOST_STAGES + 1) if shared_bytes(tile, n, layout) <= _SHARED_BYTES)


def shared_bytes(tile: int, stages: int, layout: OutLayout) -> int:
    """Shared memory of a block: the ring, then output and scales of both consumers, then the barriers."""
    ring = stages * (_COLUMNS + tile) * _STEP_BYTES
    return ring + _CONSUMERS * (layout.nbytes + 4 * tile) + 2 * stages * 8


def _typed(op: str, dtype: torch.dtype, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype != dtype or tensor.stride(-1) != 1:
            raise KernelError(
                f"{op}: '{name}' must be {dtype} with contiguous rows, got {tensor.dtype}, strides {tensor.stride()}"
            )
