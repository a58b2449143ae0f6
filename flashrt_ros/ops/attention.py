"""Attention: within one image, within the prefix, and from the chunk to prefix and chunk."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .shapes import check


def image_attention(qkv: Tensor, *, images: int, heads: int, out: Tensor) -> None:
    """Full attention within each image.

    Args:
        qkv: float[images * tokens, 3 * width], packed in the order query, key, value.
        images, heads: counts; width = heads * head_dim.
        out: float[images * tokens, width].
    """
    rows, width = out.shape
    check("image_attention", out=(out, "rows width"), qkv=(qkv, ("rows", 3 * width)))
    parts = qkv.view(images, rows // images, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
    value = F.scaled_dot_product_attention(parts[0], parts[1], parts[2])
    out.view(images, rows // images, heads, width // heads).copy_(value.transpose(1, 2))


def prefix_attention(query: Tensor, key: Tensor, value: Tensor, valid: Tensor, *, out: Tensor) -> None:
    """Attention of every row to the first `valid` rows.

    Args:
        query: float[rows, query heads, head_dim].
        key, value: float[rows, key heads, head_dim]; each key head serves query heads / key heads of them.
        valid: int32[1] on the device, at least 1.
        out: float[rows, query heads * head_dim].
    """
    check(
        "prefix_attention",
        query=(query, "rows queries head_dim"),
        key=(key, "rows heads head_dim"),
        value=(value, "rows heads head_dim"),
        valid=(valid, "1"),
        out=(out, ("rows", query.shape[1] * query.shape[2])),
    )
    out.copy_(_attend(query, key, value, _below(valid, key.shape[0])))


def chunk_attention(
    query: Tensor,
    prefix_key: Tensor,
    prefix_value: Tensor,
    chunk_key: Tensor,
    chunk_value: Tensor,
    valid: Tensor,
    *,
    out: Tensor,
) -> None:
    """Attention of the chunk's rows to the first `valid` rows of the prefix and to all rows of the chunk.

    Args:
        query: float[chunk, query heads, head_dim].
        prefix_key, prefix_value: float[rows, key heads, head_dim].
        chunk_key, chunk_value: float[chunk, key heads, head_dim].
        valid: int32[1] on the device.
        out: float[chunk, query heads * head_dim].
    """
    check(
        "chunk_attention",
        query=(query, "chunk queries head_dim"),
        prefix_key=(prefix_key, "rows heads head_dim"),
        prefix_value=(prefix_value, "rows heads head_dim"),
        chunk_key=(chunk_key, "chunk heads head_dim"),
        chunk_value=(chunk_value, "chunk heads head_dim"),
        valid=(valid, "1"),
        out=(out, ("chunk", query.shape[1] * query.shape[2])),
    )
    key = torch.cat((prefix_key, chunk_key))
    value = torch.cat((prefix_value, chunk_value))
    live = F.pad(_below(valid, prefix_key.shape[0]), (0, chunk_key.shape[0]), value=True)
    out.copy_(_attend(query, key, value, live))


def _below(valid: Tensor, rows: int) -> Tensor:
    return torch.arange(rows, device=valid.device, dtype=valid.dtype) < valid


def _attend(query: Tensor, key: Tensor, value: Tensor, live: Tensor) -> Tensor:
    """[rows, query heads * head_dim]; `live` bool[keys] says which keys take part."""
    rows, queries, head_dim = query.shape
    heads = key.shape[1]
    # Query heads that share a key head become rows of one product.
    grouped = query.view(rows, heads, queries // heads, head_dim).permute(1, 2, 0, 3).reshape(heads, -1, head_dim)
    mixed = F.scaled_dot_product_attention(
        grouped[None], key.transpose(0, 1)[None], value.transpose(0, 1)[None], attn_mask=live[None, None, None]
    )
    return mixed.view(queries, rows, head_dim).transpose(0, 1).reshape(rows, queries * head_dim)
