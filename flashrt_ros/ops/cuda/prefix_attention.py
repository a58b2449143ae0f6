"""Attention of the prefix on Hopper's own matrix instructions: eight query heads that share one key head.

Libraries treat the heads apart, so that keys and values are read once for each. Here eight rows of all heads are one
product, two blocks that share 16 rows read half of the keys each, and what attention gives can be E4M3 codes for the
product behind it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch
from torch import Tensor

from ..shapes import check
from .boundary import demand_choices, demand_dense, demand_device
from .compiler import KernelSource
from .errors import KernelError
from .kernel import architecture, kernel
from .registers import demand_registers
from .rows import CODES, Quantiser, demand_heads, lone_scale
from .tensor_map import heads_map, launch_with_maps, tensor_map

ARCHITECTURE = "sm_90a"
_OP = "prefix_attention"
_HEADS, _HEAD_DIM = 8, 256
_WIDTH = _HEADS * _HEAD_DIM
_CONSUMER_ROWS, _CONSUMERS = 8, 2  # rows of the prefix that one has; consumers of a block
_BLOCKS = 2  # of a cluster, which share their rows
_COLUMNS, _SWIZZLE = 64, 128  # of a box, and its bytes
_USUAL = {"TILE_ROWS": 80, "KEY_BUFFERS": 2, "VALUE_BUFFERS": 2}  # keys of a tile; tiles that are under way
_THREADS = 384
REGISTERS = 168  # of a thread at its launch: 2 * 232 + 40 are 3 * 168


def unsuited(device: torch.device) -> str:
    """Why the kernel cannot run on `device`; empty if it can."""
    if device.type != "cuda":
        return f"{_OP}.cu runs on a GPU, the tensors are on '{device}'"
    found = architecture(device)
    if found != ARCHITECTURE:
        return f"{_OP}.cu uses matrix instructions of {ARCHITECTURE}, this GPU is {found}"
    return ""


def prefix_attention(
    query: Tensor, key: Tensor, value: Tensor, valid: Tensor, *, out: Tensor, quantiser: Quantiser | None = None,
    overlap: bool = False, variant: Mapping[str, int] | None = None,
) -> None:  # fmt: skip
    """See the reference, for eight query heads and one key head of 256, in bfloat16.

    Args:
        query: bf16[rows, 8, 256]; the heads of a row lie one behind the other, rows may be further apart.
        key, value: bf16[rows, 1, 256], contiguous. Rows behind the first `valid` may hold anything.
        valid: int32[1] on the device, from 1 to `rows`.
        out: bf16[rows, 2048], contiguous; with `quantiser` codes (float8_e4m3fn), which are those of the bfloat16 that
            would have been stored.
        quantiser: has no multiplier.
        overlap: begin beside the kernel in front of this one, and let the next one do so; changes no bit.
        variant: other compile-time choices than the best known ones, for whoever measures them.
    """
    scale = None if quantiser is None else lone_scale(_OP, quantiser)
    _check(query, key, value, valid, out, scale)
    demand_choices(_OP, variant or {}, _USUAL)
    reason = unsuited(query.device)
    if reason:
        raise KernelError(f"{_OP}: {reason}")
    source = prefix_attention_source({**(variant or {}), "OVERLAP": int(overlap), "OUT8": int(scale is not None)})
    rows, nbytes = query.shape[0], shared_bytes(source)
    tile = source.defines["TILE_ROWS"]
    demand_registers(source, ARCHITECTURE, REGISTERS)
    launch_with_maps(
        int(kernel(source, _OP, query.device, nbytes).driver_kernel.handle),
        torch.cuda.current_stream(query.device).cuda_stream,
        blocks(rows),
        _THREADS,
        nbytes,
        (
            heads_map(query, (_CONSUMER_ROWS, _COLUMNS), _SWIZZLE),
            tensor_map(key.flatten(1), (tile, _COLUMNS), _SWIZZLE),
            tensor_map(value.flatten(1), (tile, _COLUMNS), _SWIZZLE),
            *(ctypes.c_void_p(None if t is None else t.data_ptr()) for t in (valid, out, scale)),
            ctypes.c_int(rows),
        ),
        overlap=overlap,
    )


def prefix_attention_source(defines: Mapping[str, int]) -> KernelSource:
    """The kernel with the usual choices, and `defines` in their place."""
    return KernelSource(_OP, {**_USUAL, "OUT8": 0, "OVERLAP": 0, **defines})


def blocks(rows: int) -> int:
    """Blocks of the grid: two for every 16 rows."""
    return -(-rows // (_CONSUMER_ROWS * _CONSUMERS)) * _BLOCKS


def shared_bytes(source: KernelSource) -> int:
    """Shared memory of a block: queries, buffers of keys and values, maximum and sum of given rows, the barriers."""
    tile, keys, values = (source.defines[name] for name in _USUAL)
    product_rows, pieces = _CONSUMER_ROWS * _HEADS, _HEAD_DIM // _COLUMNS
    full = keys * pieces + values + _CONSUMERS * pieces  # a barrier for each piece of keys and of queries
    empty = _CONSUMERS * (keys + values)
    barriers = full + empty + 2  # ready to be given to, and given
    return (_CONSUMERS * product_rows + (keys + values) * tile) * _HEAD_DIM * 2 + product_rows * 8 + barriers * 8


def _check(query: Tensor, key: Tensor, value: Tensor, valid: Tensor, out: Tensor, scale: Tensor | None) -> None:
    head, row = f"1 {_HEAD_DIM}", f"rows {_HEADS} {_HEAD_DIM}"
    check(
        _OP, query=(query, row), key=(key, f"rows {head}"), value=(value, f"rows {head}"), valid=(valid, "1"),
        out=(out, f"rows {_WIDTH}"),
    )  # fmt: skip
    demand_heads(_OP, query, query.shape[0])
    demand_dense(_OP, torch.bfloat16, key=key, value=value)
    demand_dense(_OP, torch.int32, alignment=4, valid=valid)
    demand_dense(_OP, torch.bfloat16 if scale is None else CODES, out=out)
    for name, tensor in {"key": key, "value": value, "valid": valid, "out": out, "scale": scale}.items():
        if tensor is not None:
            demand_device(f"{_OP}: '{name}'", tensor, query.device)
