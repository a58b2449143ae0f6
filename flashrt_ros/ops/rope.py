"""Rotary position embedding, fused with splitting QKV and writing K and V to their rows."""

from __future__ import annotations

import torch
from torch import Tensor

from .shapes import check


def rope_table(*, theta: float, out: Tensor) -> None:
    """Fill out float[positions, head_dim]: row p holds the cosines of p's angles, then the sines."""
    positions, head_dim = out.shape
    exponents = torch.arange(0, head_dim, 2, device=out.device, dtype=torch.float32) / head_dim
    angles = torch.arange(positions, device=out.device, dtype=torch.float32)[:, None] / theta**exponents
    out.copy_(torch.cat((angles.cos(), angles.sin()), dim=-1))


def select_rows(table: Tensor, start: Tensor, *, out: Tensor) -> None:
    """out[i] = table[start + i]; `start` is int32[1] on the device, so the choice is data and not shape."""
    check("select_rows", table=(table, "positions width"), start=(start, "1"), out=(out, "rows width"))
    index = start + torch.arange(out.shape[0], device=out.device, dtype=start.dtype)
    out.copy_(table.index_select(0, index))


def split_rope_write(qkv: Tensor, rope: Tensor, *, query: Tensor | None, key: Tensor, value: Tensor) -> None:
    """Split packed projections, rotate queries and keys, and write all three where attention reads them.

    Args:
        qkv: float[rows, (query heads + 2 * key heads) * head_dim], packed in the order query, key, value; without
            `query` it holds keys and values alone.
        rope: float[rows, head_dim], cosines then sines.
        query: float[rows, query heads, head_dim], written; None where only K and V are needed.
        key, value: float[rows, key heads, head_dim], written.
    """
    rows, heads, width = key.shape
    queries = 0 if query is None else query.shape[1]
    check(
        "split_rope_write",
        key=(key, "rows heads head_dim"),
        value=(value, "rows heads head_dim"),
        rope=(rope, "rows head_dim"),
        qkv=(qkv, ("rows", (queries + 2 * heads) * width)),
    )
    parts = qkv.view(rows, queries + 2 * heads, width)
    cos, sin = rope.float()[:, None, :].chunk(2, dim=-1)
    if query is not None:
        check("split_rope_write", key=(key, "rows heads head_dim"), query=(query, "rows queries head_dim"))
        query.copy_(_rotated(parts[:, :queries], cos, sin))
    key.copy_(_rotated(parts[:, queries : queries + heads], cos, sin))
    value.copy_(parts[:, queries + heads :])


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
