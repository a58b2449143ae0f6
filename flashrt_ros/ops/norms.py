"""Normalisations, fused with the residual additions in front of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .shapes import check


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float, out: Tensor) -> None:
    """out = LayerNorm(x) * weight + bias over the last axis; x and out are float[rows, width]."""
    check("layer_norm", x=(x, "rows width"), weight=(weight, "width"), bias=(bias, "width"), out=(out, "rows width"))
    out.copy_(F.layer_norm(x, (x.shape[-1],), weight, bias, eps))


def residual_rms_norm(residual: Tensor, branch: Tensor | None, *, eps: float, out: Tensor) -> None:
    """residual += branch, then out = residual / rms(residual).

    The norm has no weight: a weight folds into the matrix that consumes `out`. `residual` float[rows, width] is updated
    in place (left alone without a branch); sums and squares are taken in float32. `out` must not be `residual`.
    """
    check("residual_rms_norm", residual=(residual, "rows width"), out=(out, "rows width"))
    if branch is not None:
        check("residual_rms_norm", residual=(residual, "rows width"), branch=(branch, "rows width"))
        residual.add_(branch)
    out.copy_(_rms_normalised(residual, eps))


def gated_residual_ada_rms_norm(
    residual: Tensor, branch: Tensor | None, gate: Tensor | None, modulation: Tensor, *, eps: float, out: Tensor
) -> None:
    """residual += gate * branch, then out = residual / rms(residual) * (1 + scale) + shift.

    Args:
        residual: float[rows, width], updated in place.
        branch: float[rows, width] that the previous sub-layer produced; None for the first norm.
        gate: float[width] that the previous norm's condition produced; None exactly when `branch` is.
        modulation: float32[3, width] of this norm: scale, shift, and the gate of the branch to come (unused here).
        out: float[rows, width], not `residual`.
    """
    op = "gated_residual_ada_rms_norm"
    check(op, residual=(residual, "rows width"), modulation=(modulation, "3 width"), out=(out, "rows width"))
    if branch is not None and gate is not None:
        check(op, residual=(residual, "rows width"), branch=(branch, "rows width"), gate=(gate, "width"))
        residual.copy_(torch.addcmul(residual.float(), branch.float(), gate.float()))
    scale, shift = modulation[0], modulation[1]
    out.copy_(torch.addcmul(shift, _rms_normalised(residual, eps), 1 + scale))


def _rms_normalised(x: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
