"""The reference path of a tier: ops that quantise what enters each site and read its packed weight.

These define what a kernel of the tier must compute. A weight that is not packed goes to the 16-bit reference.
"""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from ..ops import OpTable, check
from .packed import PackedWeight


def tier_ops(ops: OpTable) -> OpTable:
    """`ops` with a `linear` and an `embed` that also take packed weights."""
    return replace(ops, linear=_Linear(ops), embed=_Embed(ops))


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
