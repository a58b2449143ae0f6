"""The reference path of a tier: ops that quantise what enters each site and read its packed weight.

These define what a kernel of the tier must compute. A weight that is not packed goes to the 16-bit reference.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import OpTable, check
from . import e4m3
from .packed import PackedWeight

_WEIGHT_SCALE = 1 / 256  # of attention's weights, of which the greatest is one


def tier_ops(ops: OpTable) -> OpTable:
    """`ops` with a `linear` and an `embed` that also take packed weights, a `prefix_attention` that takes scales."""
    return replace(ops, linear=_Linear(ops), embed=_Embed(ops), prefix_attention=_PrefixAttention(ops))


def packed_linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    out: Tensor,
) -> None:
    """out = activation(q(x) @ w.T + bias) + residual, in float32 until `out`.

    q(x) is `weight.quantised_input(x)`, w what the codes stand for; arguments are those of `flashrt_ros.ops.linear`.
    """
    check("packed_linear", x=(x, "rows inputs"), weight=(weight, "outputs inputs"), out=(out, "rows outputs"))
    value = F.linear(weight.quantised_input(x), weight.decode(), None if bias is None else bias.float())
    if activation is not None:
        value = F.gelu(value, approximate="tanh")
    if residual is not None:
        check("packed_linear", out=(out, "rows outputs"), residual=(residual, "rows outputs"))
        value += residual
    out.copy_(value)


def packed_embed(tokens: Tensor, table: PackedWeight, *, scale: float, out: Tensor) -> None:
    """out[i] = table[tokens[i]] * scale; arguments are those of `flashrt_ros.ops.embed`."""
    check("packed_embed", tokens=(tokens, "rows"), table=(table, "vocabulary width"), out=(out, "rows width"))
    out.copy_(table.decode(tokens.clamp(min=0)) * scale)


def coded_prefix_attention(
    query: Tensor, key: Tensor, value: Tensor, valid: Tensor, *, scales: Tensor, out: Tensor
) -> None:
    """Attention of E4M3 codes, in float32 until `out`; arguments are those of `flashrt_ros.ops.prefix_attention`.

    The weights of a row are rounded to codes too; what divides them is their sum before that.

    Args:
        scales: float32[3], of queries, keys and values.
    """
    check(
        "coded_prefix_attention", query=(query, "rows queries head_dim"), key=(key, "rows heads head_dim"),
        value=(value, "rows heads head_dim"), valid=(valid, "1"), scales=(scales, "3"),
        out=(out, ("rows", query.shape[1] * query.shape[2])),
    )  # fmt: skip
    (rows, queries, width), heads = query.shape, key.shape[1]
    q, k, v = (_rounded(x, scale) for x, scale in zip((query, key, value), scales, strict=True))
    live = torch.arange(rows, device=valid.device, dtype=valid.dtype) < valid
    scores = torch.einsum("rhgd,khd->rhgk", q.view(rows, heads, queries // heads, width), k) / math.sqrt(width)
    scores = scores.masked_fill(~live, -math.inf)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    coded = e4m3.decode(e4m3.encode(weights / _WEIGHT_SCALE)) * _WEIGHT_SCALE
    mixed = torch.einsum("rhgk,khd->rhgd", coded, v.masked_fill(~live[:, None, None], 0.0))
    out.copy_((mixed / weights.sum(-1, keepdim=True)).reshape(out.shape))


def _rounded(x: Tensor, scale: Tensor) -> Tensor:
    """float32: what the codes of `x` stand for."""
    return e4m3.decode(e4m3.quantise(x, scale)) * scale


class _PrefixAttention:
    def __init__(self, ops: OpTable) -> None:
        self._wide = ops.prefix_attention

    def __call__(self, *tensors: Tensor, scales: Tensor | None = None, out: Tensor) -> None:
        if scales is None:
            self._wide(*tensors, out=out)
        else:
            coded_prefix_attention(*tensors, scales=scales, out=out)


class _Linear:
    def __init__(self, ops: OpTable) -> None:
        self._wide = ops.linear

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, **keywords: object) -> None:
        if isinstance(weight, PackedWeight):
            packed_linear(x, weight, bias, **keywords)  # type: ignore[arg-type]
        else:
            self._wide(x, weight, bias, **keywords)


class _Embed:
    def __init__(self, ops: OpTable) -> None:
        self._wide = ops.embed

    def __call__(self, tokens: Tensor, table: Tensor, *, scale: float, out: Tensor) -> None:
        if isinstance(table, PackedWeight):
            packed_embed(tokens, table, scale=scale, out=out)
        else:
            self._wide(tokens, table, scale=scale, out=out)
