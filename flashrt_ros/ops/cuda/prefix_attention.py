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
from .head_codes import HEAD_DIM, HEADS, VALUE_KEYS, HeadCodes
from .kernel import HOPPER, architecture, kernel
from .registers import demand_registers
from .rows import CODES, Quantiser, demand_heads, lone_scale
from .tensor_map import TensorMap, heads_map, launch_with_maps, tensor_map

_OP = "prefix_attention"
_WIDTH = HEADS * HEAD_DIM
_CONSUMER_ROWS, _CONSUMERS = 8, 2  # rows of the prefix that one has; consumers of a block
_BLOCKS = 2  # of a cluster, which share their rows
_SWIZZLE = 128  # bytes of a row of a box
_USUAL = {"TILE_ROWS": 80, "KEY_BUFFERS": 2, "VALUE_BUFFERS": 2}  # keys of a tile; tiles that are under way
_USUAL_OF_CODES = {"TILE_ROWS": 64, "KEY_BUFFERS": 4, "VALUE_BUFFERS": 4}
_THREADS = 384
REGISTERS = 168  # of a thread at its launch: 2 * 232 + 40 are 3 * 168


def unsuited(device: torch.device) -> str:
    """Why the kernel cannot run on `device`; empty if it can."""
    if device.type != "cuda":
        return f"{_OP}.cu runs on a GPU, the tensors are on '{device}'"
    found = architecture(device)
    if found != HOPPER:
        return f"{_OP}.cu uses matrix instructions of {HOPPER}, this GPU is {found}"
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
    head, rows = f"1 {HEAD_DIM}", query.shape[0]
    check(_OP, query=(query, f"rows {HEADS} {HEAD_DIM}"), key=(key, f"rows {head}"), value=(value, f"rows {head}"))
    demand_heads(_OP, query, rows)
    demand_dense(_OP, torch.bfloat16, key=key, value=value)
    for name, tensor in {"key": key, "value": value}.items():
        demand_device(f"{_OP}: '{name}'", tensor, query.device)
    choices = _choices(variant, fp8=False)
    scale = _demand(query, valid, out, quantiser)
    tile, columns = choices["TILE_ROWS"], _SWIZZLE // query.element_size()
    maps = (
        heads_map(query, (_CONSUMER_ROWS, columns), _SWIZZLE),
        tensor_map(key.flatten(1), (tile, columns), _SWIZZLE),
        tensor_map(value.flatten(1), (tile, columns), _SWIZZLE),
    )
    _launch(maps, (valid, out, scale), query, choices, overlap)


def prefix_attention_of_codes(
    codes: HeadCodes, valid: Tensor, *, out: Tensor, quantiser: Quantiser | None = None, overlap: bool = False,
    variant: Mapping[str, int] | None = None,
) -> None:  # fmt: skip
    """The same for E4M3 codes. The weights of values are rounded to codes too, under a scale of 1/256 of the greatest
    one; what divides a row's sum is the sum of its weights before that.

    Args:
        codes: of all rows; what stands behind the first `valid` may be anything.
        valid, out, quantiser, overlap, variant: as for `prefix_attention`. Scales of codes are not made by the kernel
            in front.
    """
    rows = codes.query.shape[0]
    codes.demand(_OP, rows, codes.query.device)
    choices = _choices(variant, fp8=True)
    scale = _demand(codes.query, valid, out, quantiser)
    maps = (
        heads_map(codes.query, (_CONSUMER_ROWS, _SWIZZLE), _SWIZZLE),
        tensor_map(codes.key, (choices["TILE_ROWS"], _SWIZZLE), _SWIZZLE),
        tensor_map(codes.value.flatten(0, 1), (HEAD_DIM, VALUE_KEYS), VALUE_KEYS),
    )
    _launch(maps, (codes.scales, valid, out, scale), codes.query, choices, overlap)


def _choices(variant: Mapping[str, int] | None, *, fp8: bool) -> dict[str, int]:
    demand_choices(_OP, variant or {}, _USUAL)
    return {**(_USUAL_OF_CODES if fp8 else _USUAL), **(variant or {}), "FP8": int(fp8)}


def _demand(query: Tensor, valid: Tensor, out: Tensor, quantiser: Quantiser | None) -> Tensor | None:
    """The scale of the result's codes; an error where there is something that the kernel does not take."""
    scale = None if quantiser is None else lone_scale(_OP, quantiser)
    check(_OP, query=(query, "rows heads head_dim"), valid=(valid, "1"), out=(out, f"rows {_WIDTH}"))
    demand_dense(_OP, torch.int32, alignment=4, valid=valid)
    demand_dense(_OP, torch.bfloat16 if scale is None else CODES, out=out)
    for name, tensor in {"valid": valid, "out": out, "scale": scale}.items():
        if tensor is not None:
            demand_device(f"{_OP}: '{name}'", tensor, query.device)
    reason = unsuited(query.device)
    if reason:
        raise KernelError(f"{_OP}: {reason}")
    return scale


def _launch(
    maps: tuple[TensorMap, ...], tensors: tuple[Tensor | None, ...], query: Tensor, choices: Mapping[str, int],
    overlap: bool,
) -> None:  # fmt: skip
    *_, scale = tensors
    source = prefix_attention_source({**choices, "OVERLAP": int(overlap), "OUT8": int(scale is not None)})
    rows, nbytes = query.shape[0], shared_bytes(source)
    demand_registers(source, HOPPER, REGISTERS)
    launch_with_maps(
        int(kernel(source, _OP, query.device, nbytes).driver_kernel.handle),
        torch.cuda.current_stream(query.device).cuda_stream,
        blocks(rows),
        _THREADS,
        nbytes,
        (
            *maps,
            *(ctypes.c_void_p(None if t is None else t.data_ptr()) for t in tensors),
            ctypes.c_int(rows),
        ),
        overlap=overlap,
    )


def prefix_attention_source(defines: Mapping[str, int]) -> KernelSource:
    """The kernel with the usual choices, and `defines` in their place."""
    usual = _USUAL_OF_CODES if defines.get("FP8") else _USUAL
    return KernelSource(_OP, {**usual, "FP8": 0, "OUT8": 0, "OVERLAP": 0, **defines})


def blocks(rows: int) -> int:
    """Blocks of the grid: two for every 16 rows."""
    return -(-rows // (_CONSUMER_ROWS * _CONSUMERS)) * _BLOCKS


def shared_bytes(source: KernelSource) -> int:
    """Shared memory of a block: queries, buffers of keys and values, maximum and sum of given rows, the barriers."""
    tile, keys, values = (source.defines[name] for name in _USUAL)
    row_bytes = HEAD_DIM * (1 if source.defines["FP8"] else 2)
    product_rows, pieces = _CONSUMER_ROWS * HEADS, row_bytes // _SWIZZLE
    full = keys * pieces + values + _CONSUMERS * pieces  # a barrier for each piece of keys and of queries
    empty = _CONSUMERS * (keys + values)
    barriers = full + empty + 2  # ready to be given to, and given
    return (_CONSUMERS * product_rows + (keys + values) * tile) * row_bytes + product_rows * 8 + barriers * 8
