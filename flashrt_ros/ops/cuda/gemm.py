"""Matrix products of a few hundred rows on Hopper's own matrix instructions, with the step behind them inside.

For the shapes of a prefix encoder cuBLASLt loses twice: its tiles of 128 rows waste a part of 712, and GeGLU behind the
product reads and writes everything once more.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from ..shapes import ShapeError, check
from .compiler import KernelSource
from .errors import KernelError
from .kernel import architecture, kernel
from .tensor_map import launch_with_maps, tensor_map

ARCHITECTURE = "sm_90a"
_COLUMNS, _OUT_COLUMNS = 128, 32  # weight rows of a tile; outputs that one copy stores
_STEP_BYTES = 128  # of a row of x or of the weights, in one stage
_GROUP = 8  # gate rows, then as many up rows
_THREADS, _ROWS_PER_RMS_BLOCK, _RMS_THREADS = 384, 8, 256
_TILE_OVERHEAD = 16  # what a tile costs beside its products, in rows


def unsuited(device: torch.device) -> str:
    """Why the products cannot run on `device`; empty if they can."""
    found = architecture(device)
    if found != ARCHITECTURE:
        return f"gemm.cu uses matrix instructions of {ARCHITECTURE}, this GPU is {found}"
    return ""


def interleave_gate_up(weight: Tensor) -> Tensor:
    """Gate rows before up rows → 8 gate rows, the 8 up rows of the same outputs, and so on.

    `weight` is [2 * hidden, inputs], and so is the result, a copy. `hidden` is a multiple of 8.
    """
    if weight.shape[0] % (2 * _GROUP):
        raise ShapeError(
            f"interleave_gate_up: 'weight' dimension 0 must be a multiple of {2 * _GROUP}, got {weight.shape[0]}"
        )
    return weight.view(2, -1, _GROUP, weight.shape[1]).transpose(0, 1).reshape(weight.shape)


@lru_cache(maxsize=64)
def tile_rows(rows: int, column_tiles: int, processors: int) -> int:
    """Rows of x that a tile should hold so that all tiles, dealt in waves to all multiprocessors, end soonest."""
    smallest = -(-rows // 256)
    choices = [_GROUP * -(-rows // (_GROUP * count)) for count in range(smallest, smallest + 4)]

    def cost(tile: int) -> int:
        waves = -(-(-(-rows // tile) * column_tiles) // processors)
        return waves * (tile + _TILE_OVERHEAD)

    return min(choices, key=cost)


def inverse_rms_rows(x: Tensor, *, eps: float, out: Tensor, overlap: bool = False) -> None:
    """out float32[rows] = 1 / sqrt(mean(x²) + eps) of each row of x bf16[rows, width].

    With `overlap`, the next launch may begin before this one ends.
    """
    check("inverse_rms_rows", x=(x, "rows width"), out=(out, "rows"))
    _typed("inverse_rms_rows", torch.bfloat16, x=x)
    _typed("inverse_rms_rows", torch.float32, out=out)
    source = KernelSource("prefix", {"WIDTH": x.shape[1], "OVERLAP": int(overlap)})
    blocks = -(-x.shape[0] // _ROWS_PER_RMS_BLOCK)
    kernel(source, "inverse_rms_rows", x.device).launch(blocks, _RMS_THREADS, x, out, x.shape[0], eps)


def gate_up_geglu(
    x: Tensor, weight: Tensor, *, out: Tensor, scale: Tensor | None = None, overlap: bool = False,
    variant: Mapping[str, int] | None = None,
) -> None:  # fmt: skip
    """out = gelu_tanh(gate) * up of (scale * x) @ weight.T, summed in float32 and rounded once.

    Args:
        x: bf16[rows, inputs]; `inputs` is a multiple of 64. Or E4M3 (float8_e4m3fn), of 128; `weight` likewise.
        weight: bf16[2 * hidden, inputs] as `interleave_gate_up` makes it; `hidden` is a multiple of 64.
        out: bf16[rows, hidden].
        scale: float32[rows], a factor for each row of x, applied to the sums; None for 1.
        overlap: begin beside the kernel in front of this one, which makes `scale` and nothing else that is read here.
        variant: other compile-time choices than the best known ones, for whoever measures them.
    """
    check(
        "gate_up_geglu",
        x=(x, "rows inputs"),
        out=(out, "rows hidden"),
        weight=(weight, (2 * out.shape[1], "inputs")),
        **({} if scale is None else {"scale": (scale, "rows")}),
    )
    _launch("gate_up_geglu", x, weight, out, scale, overlap, {"GEGLU": 1, **(variant or {})})


def product(
    x: Tensor, weight: Tensor, *, out: Tensor, scale: Tensor | None = None, overlap: bool = False,
    variant: Mapping[str, int] | None = None,
) -> None:  # fmt: skip
    """out bf16[rows, outputs] = (scale * x) @ weight.T; weight bf16[outputs, inputs], outputs a multiple of 128.

    The other arguments are those of `gate_up_geglu`.
    """
    check(
        "product",
        x=(x, "rows inputs"),
        weight=(weight, "outputs inputs"),
        out=(out, "rows outputs"),
        **({} if scale is None else {"scale": (scale, "rows")}),
    )
    _launch("product", x, weight, out, scale, overlap, variant or {})


def _launch(
    op: str, x: Tensor, weight: Tensor, out: Tensor, scale: Tensor | None, overlap: bool, variant: Mapping[str, int]
) -> None:
    fp8 = x.dtype == torch.float8_e4m3fn
    _typed(op, torch.float8_e4m3fn if fp8 else torch.bfloat16, x=x, weight=weight)
    _typed(op, torch.bfloat16, out=out)
    if scale is not None:
        _typed(op, torch.float32, scale=scale)
    reason = unsuited(x.device)
    if reason:
        raise KernelError(f"{op}: {reason}")
    step = _STEP_BYTES // x.element_size()
    rows, inputs = x.shape
    if inputs % step or weight.shape[0] % _COLUMNS:
        raise ShapeError(
            f"{op}: 'weight' must be [a multiple of {_COLUMNS}, a multiple of {step}], got {list(weight.shape)}"
        )
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    column_tiles = weight.shape[0] // _COLUMNS
    tile = variant.get("TILE_ROWS") or tile_rows(rows, column_tiles, processors)
    source = product_source({**variant, "TILE_ROWS": tile, "OVERLAP": int(overlap), "FP8": int(fp8)})
    cluster, stages = source.defines["CLUSTER"], source.defines["STAGES"]
    if column_tiles % cluster:
        raise ShapeError(f"{op}: {column_tiles} tiles of {_COLUMNS} outputs make no clusters of {cluster}")
    blocks = min(processors // cluster * cluster, -(-rows // tile) * column_tiles)
    nbytes = shared_bytes(tile, stages)
    loaded = kernel(source, "gemm", x.device, nbytes)
    launch_with_maps(
        int(loaded.driver_kernel.handle),
        torch.cuda.current_stream(x.device).cuda_stream,
        blocks,
        _THREADS,
        nbytes,
        (
            tensor_map(weight, (_COLUMNS, step), _STEP_BYTES),
            tensor_map(x, (tile // cluster, step), _STEP_BYTES),
            tensor_map(out, (tile, _OUT_COLUMNS), 2 * _OUT_COLUMNS),
            ctypes.c_void_p(None if scale is None else scale.data_ptr()),
            ctypes.c_int(rows),
            ctypes.c_int(column_tiles),
            ctypes.c_int(inputs // step),
        ),
        overlap=overlap,
    )


def product_source(defines: Mapping[str, int]) -> KernelSource:
    """The kernel with the best known choices, and `defines` in their place; TILE_ROWS has to be among them."""
    return KernelSource(
        "gemm", {"STAGES": 4, "CLUSTER": 1, "STAGGER": 1, "GEGLU": 0, "FP8": 0, "OVERLAP": 0, **defines}
    )


def shared_bytes(tile: int, stages: int) -> int:
    """Shared memory of a block: the ring, then output and scales of both consumers, then the barriers."""
    ring = stages * (_COLUMNS + tile) * _STEP_BYTES
    return ring + 2 * tile * (2 * _OUT_COLUMNS + 4) + 2 * stages * 8


def _typed(op: str, dtype: torch.dtype, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype != dtype or tensor.stride(-1) != 1:
            raise KernelError(
                f"{op}: '{name}' must be {dtype} with contiguous rows, got {tensor.dtype}, strides {tensor.stride()}"
            )
