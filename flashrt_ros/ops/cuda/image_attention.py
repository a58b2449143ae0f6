"""Attention within each image in one kernel, for the few hundred tokens and the odd head widths of vision encoders."""

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
from .kernel import kernel
from .rows import CODES, Quantiser, lone_scale
from .tensor_map import launch_with_maps, tensor_map

_OP = "image_attention"
_QUERIES = 64  # of a block
_MOST_TOKENS = 256  # whose scores registers hold
_LEAST_HEAD, _MOST_HEAD = 24, 120
_PIECES = 4  # in which keys arrive
_PARTS = 2  # of the keys, each for warps of its own
_THREADS = _QUERIES // 16 * _PARTS * 32  # a warp has 16 queries and one part of the keys
_RESERVED = 1024  # bytes of shared memory, of each block
_CHOICES = ("CLUSTER",)


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
        variant: other compile-time choices than the best known ones, for whoever measures them.
    """
    check(_OP, out=(out, "rows width"), qkv=(qkv, ("rows", 3 * out.shape[-1])))
    tokens, head_dim = _shares(out.shape[0], "rows", "images", images), _shares(out.shape[1], "columns", "heads", heads)
    reason = unsuited(tokens, head_dim)
    if reason:
        raise ShapeError(f"{reason}; use scaled_dot_product_attention for other sizes")
    scale = None if quantiser is None else lone_scale(_OP, quantiser)
    _demand_memory(qkv, out, scale)
    demand_choices(_OP, variant or {}, _CHOICES)
    source = image_attention_source(
        tokens, heads, head_dim, {"QUANTISED": int(scale is not None), "OVERLAP": int(overlap), **(variant or {})}
    )
    blocks, nbytes = images * heads * (tokens // _QUERIES), source.defines["SHARED_BYTES"]
    if overlap:
        nbytes = max(nbytes, _spreading_bytes(blocks, qkv.device))
    launch_with_maps(
        int(kernel(source, _OP, qkv.device, nbytes).driver_kernel.handle),
        torch.cuda.current_stream(qkv.device).cuda_stream,
        blocks,
        _THREADS,
        nbytes,
        (
            tensor_map(qkv, (box_rows(tokens, source.defines["CLUSTER"]), head_dim), 0),
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_void_p(None if scale is None else scale.data_ptr()),
            ctypes.c_float(math.log2(math.e) / math.sqrt(head_dim)),
        ),
        overlap=overlap,
    )


def image_attention_source(tokens: int, heads: int, head_dim: int, defines: Mapping[str, int]) -> KernelSource:
    """The kernel with the usual choices, and `defines` in their place."""
    usual = {"CLUSTER": 2 if tokens // _QUERIES % 2 == 0 else 1, "QUANTISED": 0, "OVERLAP": 0}
    sizes = {"TOKENS": tokens, "HEADS": heads, "HEAD_DIM": head_dim, "SHARED_BYTES": shared_bytes(tokens, head_dim)}
    return KernelSource(_OP, {**usual, **defines, **sizes})


def shared_bytes(tokens: int, head_dim: int) -> int:
    """Shared memory of a block: what it reads, or later the results of the parts; their extremes; the barriers."""
    inputs = (_QUERIES + 2 * tokens) * head_dim * 2
    results = _PARTS * _QUERIES * head_dim * 4
    return max(inputs, results) + _PARTS * _QUERIES * 8 + (1 + 2 * _PIECES) * 8


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
