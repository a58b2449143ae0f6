"""Matrix products with the epilogues that the next op wants."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .shapes import check

Activation = Literal["gelu_tanh"]


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    out: Tensor,
) -> None:
    """out = activation(x @ weight.T + bias) + residual.

    Args:
        x: float[rows, inputs], of the weight's dtype.
        weight: float[outputs, inputs]; `bias` float[outputs].
        activation: None, or "gelu_tanh" (the tanh approximation).
        residual: float[rows, outputs]; may be `out` itself.
        out: float[rows, outputs], of any float dtype; must not be `x`.
    """
    check("linear", x=(x, "rows inputs"), weight=(weight, "outputs inputs"), out=(out, "rows outputs"))
    if bias is not None:
        check("linear", weight=(weight, "outputs inputs"), bias=(bias, "outputs"))
    if residual is not None:
        check("linear", out=(out, "rows outputs"), residual=(residual, "rows outputs"))
    value = F.linear(x, weight, bias)
    if activation is not None:
        value = F.gelu(value, approximate="tanh")
    if residual is not None:
        torch.add(value, residual, out=out)
    else:
        out.copy_(value)


def geglu(gate_up: Tensor, *, out: Tensor) -> None:
    """out = gelu_tanh(gate) * up; `gate_up` float[rows, 2 * hidden] holds all of gate, then all of up."""
    hidden = out.shape[-1]
    check("geglu", gate_up=(gate_up, ("rows", 2 * hidden)), out=(out, "rows hidden"))
    gate, up = gate_up[:, :hidden].float(), gate_up[:, hidden:].float()
    out.copy_(F.gelu(gate, approximate="tanh").mul_(up))
