"""Attention within each image in one kernel, for the few hundred tokens and the odd head widths of vision encoders.

There are two kernels for the same sizes: image_attention_wgmma.cu for Hopper's warpgroup instructions, and
image_attention.cu for all other GPUs. Their results differ by rounding.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from ..shapes import ShapeError, check
from .boundary import demand_choices, demand_dense, demand_device
from .compiler import KernelSource
from .kernel import HOPPER, architecture, kernel
from .rows import CODES, Quantiser, lone_scale
from .tensor_map import TensorMap, heads_map, launch_with_maps, tensor_map

_OP, _WGMMA = "image_attention", "image_attention_wgmma"
_QUERIES = 64  # of a block
_MOST_TOKENS = 256  # whose scores registers hold
_LEAST_HEAD, _MOST_HEAD = 24, 120
_PIECES = 4  # in which keys arrive
_PARTS = 2  # of the keys, each for warps of its own
_THREADS = _QUERIES // 16 * _PARTS * 32  # a warp has 16 queries and one part of the keys
_RESERVED = 1024  # bytes of shared memory, of each block
_CHOICES = ("CLUSTER", "WARPGROUPS")  # of both kernels

_WARPGROUP = 128  # threads
_LINES = {"KEY_LINE": 128, "VALUE_LINE": 64, "VALUE_PIECES": 4}  # see image_attention_wgmma.cu
_WIDE_LINE = 128  # bytes, the widest that the engine swizzles


def image_attention(
    qkv: Tensor, *, images: int, heads: int, out: Tensor, quantiser: Quantiser | None = None, overlap: bool = False,
    variant: Mapping[str, int] | None = None,
) -> None:  # fmt: skip
    """See the reference; `qkv` and `out` bf16, both contiguous.

    An image has 64, 128, 192 or 256 tokens, a head an odd multiple of 8 from 24 to 120 values; anything else is a
    ShapeError.

    Args:
        quantiser: `out` is codes (float8_e4m3fn) of what it would have been, as `rows.quantise` gives them; it has no
            multiplier.
        overlap: begin beside the kernel in front of this one; changes no bit.
        variant: other compile-time choices than the best known ones, for whoever measures them. WARPGROUPS 0 is the
            kernel without warpgroup instructions.
    """
    check(_OP, out=(out, "rows width"), qkv=(qkv, ("rows", 3 * out.shape[-1])))
    tokens, head_dim = _shares(out.shape[0], "rows", "images", images), _shares(out.shape[1], "columns", "heads", heads)
    reason = unsuited(tokens, head_dim)
    if reason:
        raise ShapeError(f"{reason}; use scaled_dot_product_attention for other sizes")
    scale = None if quantiser is None else lone_scale(_OP, quantiser)
    _demand_memory(qkv, out, scale)
    source, threads = _chosen(
        (tokens, heads, head_dim), variant or {}, {"QUANTISED": int(scale is not None), "OVERLAP": int(overlap)}, qkv
    )
    blocks, nbytes = images * heads * (tokens // _QUERIES), source.defines["SHARED_BYTES"]
    if overlap:
        nbytes = max(nbytes, _spreading_bytes(blocks, qkv.device))
    launch_with_maps(
        int(kernel(source, source.name, qkv.device, nbytes).driver_kernel.handle),
        torch.cuda.current_stream(qkv.device).cuda_stream,
        blocks,
        threads,
        nbytes,
        (
            *_maps(qkv, source),
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_void_p(None if scale is None else scale.data_ptr()),
            ctypes.c_float(math.log2(math.e) / math.sqrt(head_dim)),
        ),
        overlap=overlap,
    )


def _chosen(
    sizes: tuple[int, int, int], variant: Mapping[str, int], flags: Mapping[str, int], qkv: Tensor
) -> tuple[KernelSource, int]:
    """The kernel for the GPU of `qkv`, and its threads. sizes: tokens, heads, head_dim."""
    demand_choices(_OP, variant, (*_CHOICES, *_LINES))
    warpgroups = variant.get("WARPGROUPS")
    if warpgroups is None:
        warpgroups = 2 if architecture(qkv.device) == HOPPER else 0
    if warpgroups == 0:
        demand_choices(_OP, variant, _CHOICES)
        others = {name: value for name, value in variant.items() if name != "WARPGROUPS"}
        return image_attention_source(*sizes, {**flags, **others}), _THREADS
    source = wgmma_source(*sizes, {**flags, **variant})
    return source, source.defines["WARPGROUPS"] * _WARPGROUP


def _maps(qkv: Tensor, source: KernelSource) -> tuple[TensorMap, ...]:
    """The boxes in which the kernel fetches queries, keys and values."""
    sizes = source.defines
    tokens, head_dim, cluster = sizes["TOKENS"], sizes["HEAD_DIM"], sizes["CLUSTER"]
    if source.name == _OP:
        return (tensor_map(qkv, (box_rows(tokens, cluster), head_dim), 0),)
    heads = qkv.view(qkv.shape[0], 3 * sizes["HEADS"], head_dim)
    keys, values = tokens // _PIECES // cluster, tokens // sizes["VALUE_PIECES"] // cluster
    lines = [line for line, _ in key_blocks(head_dim, sizes["KEY_LINE"])]
    return (
        heads_map(heads, (_QUERIES, head_dim), 0, of=1),
        *(heads_map(heads, (keys, line // 2), line, of=1) for line in (lines[0], lines[-1])),
        heads_map(heads, (values, sizes["VALUE_LINE"] // 2), sizes["VALUE_LINE"], of=1),
    )


def image_attention_source(tokens: int, heads: int, head_dim: int, defines: Mapping[str, int]) -> KernelSource:
    """The kernel with the usual choices, and `defines` in their place."""
    sizes = {"TOKENS": tokens, "HEADS": heads, "HEAD_DIM": head_dim, "SHARED_BYTES": shared_bytes(tokens, head_dim)}
    return KernelSource(_OP, {"CLUSTER": _cluster(tokens), "QUANTISED": 0, "OVERLAP": 0, **defines, **sizes})


def wgmma_source(tokens: int, heads: int, head_dim: int, defines: Mapping[str, int]) -> KernelSource:
    """The kernel for Hopper with the usual choices, and `defines` in their place."""
    usual = {"CLUSTER": _cluster(tokens), "WARPGROUPS": 2, **_LINES, "QUANTISED": 0, "OVERLAP": 0}
    sizes = {"TOKENS": tokens, "HEADS": heads, "HEAD_DIM": head_dim, "TILE_ROWS": tokens // _PIECES}
    chosen = {**usual, **defines, **sizes}
    return KernelSource(_WGMMA, {**chosen, "SHARED_BYTES": wgmma_shared_bytes(chosen)})


def _cluster(tokens: int) -> int:
    return 2 if tokens // _QUERIES % 2 == 0 else 1


def shared_bytes(tokens: int, head_dim: int) -> int:
    """Shared memory of a block: what it reads, or later the results of the parts; their extremes; the barriers."""
    inputs = (_QUERIES + 2 * tokens) * head_dim * 2
    results = _PARTS * _QUERIES * head_dim * 4
    return max(inputs, results) + _PARTS * _QUERIES * 8 + (1 + 2 * _PIECES) * 8


def wgmma_shared_bytes(sizes: Mapping[str, int]) -> int:
    """The same for Hopper's kernel: each part's keys and values, or what is given in their place; queries; barriers."""
    head_dim, parts = sizes["HEAD_DIM"], sizes["WARPGROUPS"]
    key_bytes = sum(line * blocks for line, blocks in key_blocks(head_dim, sizes["KEY_LINE"]))
    value_bytes = -(-head_dim * 2 // sizes["VALUE_LINE"]) * sizes["VALUE_LINE"]
    part = sizes["TOKENS"] // parts * (key_bytes + value_bytes)
    given = (1 + head_dim // 8) * _WARPGROUP * 16 if parts > 1 else 0
    barriers = 1 + _PIECES + sizes["VALUE_PIECES"]
    return parts * max(part, given) + _QUERIES * head_dim * 2 + barriers * 8


def key_blocks(head_dim: int, key_line: int) -> tuple[tuple[int, int], ...]:
    """How a key lies in shared memory for Hopper's kernel: bytes of a line, and how many blocks have such lines.

    Blocks of 64 columns first, unless `key_line` is 64: then all blocks have 32 columns.
    """
    wide = head_dim // 64 if key_line == _WIDE_LINE else 0
    rest = head_dim * 2 - wide * _WIDE_LINE
    line = 64 if key_line == 64 else next(line for line in (32, 64, 128) if rest <= line)
    blocks = ((_WIDE_LINE, wide), (line, -(-rest // line)))
    return blocks if wide else blocks[1:]


@lru_cache(maxsize=16)
def _spreading_bytes(blocks: int, device: torch.device) -> int:
    """`spreading_bytes` on this GPU, as far as a block may have so much."""
    gpu = torch.cuda.get_device_properties(device)
    most = int(getattr(gpu, "shared_memory_per_block_optin"))  # noqa: B009 - missing in torch's stubs
    return min(spreading_bytes(blocks, gpu.multi_processor_count, gpu.shared_memory_per_multiprocessor), most)


def spreading_bytes(blocks: int, processors: int, shared: int) -> int:
    """Shared memory of a block with which no more blocks than need be are on one multiprocessor at a time.

    Blocks that begin beside the kernel in front would otherwise double up on the multiprocessors that it leaves free.

    Args:
        blocks: of the launch.
        processors: of the GPU.
        shared: bytes of a multiprocessor.
    """
    together = -(-blocks // processors)
    return shared // (together + 1) + 1 - _RESERVED


def box_rows(tokens: int, cluster: int) -> int:
    """Rows that one copy of the engine moves: a power of two that divides the queries and a block's share of keys."""
    share = tokens // _PIECES // cluster
    return share & -share


def unsuited(tokens: int, head_dim: int) -> str:
    """Why the kernel cannot serve images of `tokens` rows and heads of `head_dim` columns; empty if it can."""
    fits = tokens % _QUERIES == 0 and 0 < tokens <= _MOST_TOKENS
    if fits and head_dim % 16 == 8 and _LEAST_HEAD <= head_dim <= _MOST_HEAD:
        return ""
    return (
        f"{_OP}.cu takes images of a multiple of {_QUERIES} tokens up to {_MOST_TOKENS} and heads of an odd multiple "
        f"of 8 from {_LEAST_HEAD} to {_MOST_HEAD}, found {tokens} and {head_dim}"
    )


def _shares(total: int, axis: str, name: str, count: int) -> int:
    """What each of `count` has of the rows or columns of the result."""
    if count < 1 or total % count:
        raise ShapeError(f"{_OP}: '{name}' must divide the {total} {axis} of 'out', got {count}")
    return total // count


def _demand_memory(qkv: Tensor, out: Tensor, scale: Tensor | None) -> None:
    demand_dense(_OP, torch.bfloat16, qkv=qkv)
    demand_dense(_OP, torch.bfloat16 if scale is None else CODES, out=out)
    demand_device(f"{_OP}: 'out'", out, qkv.device)
    if scale is not None:
        demand_device(f"{_OP}: 'scale'", scale, qkv.device)
