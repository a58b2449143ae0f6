"""Flow matching: the Euler step as the accumulation of a matrix product."""

from __future__ import annotations

import torch
from torch import Tensor

from .shapes import check


def euler_update(x: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor) -> None:
    """x += hidden @ weight.T + bias, where weight and bias carry the step size already.

    x float32[rows, actions] is updated in place; hidden float[rows, width] is widened to float32.
    """
    check(
        "euler_update",
        x=(x, "rows actions"),
        hidden=(hidden, "rows width"),
        weight=(weight, "actions width"),
        bias=(bias, "actions"),
    )
    x.add_(torch.addmm(bias, hidden.float(), weight.t()))
