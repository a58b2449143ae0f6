"""Activation-aware scaling: move range between a product's input and its weight before both are quantised.

Inputs that are large on average are divided, and the columns of the weight that meet them multiplied, so that the
weights that matter most are rounded finest; the idea is AWQ's (Lin et al., 2023). How far is chosen for each site by
what it gains on sampled rows. Factors are powers of two, so that folding them into a norm changes no bit in any type.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..contract import WIDE, SiteFormat
from . import e4m3, nvfp4
from .packed import PackedWeight

STRENGTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
_LARGEST_EXPONENT = 6


@dataclass(frozen=True)
class Choice:
    """The best scaling of one site.

    Attributes:
        strength: exponent of the mean magnitudes; 0 leaves all as it is.
        multiplier: float32[inputs] for the input, powers of two; None at strength 0.
        error: |quantised - exact| / |exact| of the product on the sampled rows, 2-norm.
    """

    strength: float
    multiplier: Tensor | None
    error: float


def multiplier_for(mean: Tensor, strength: float) -> Tensor:
    """float32[inputs]: mean ** -strength, centred on 1 and rounded to powers of two; 1 for inputs that are zero."""
    alive = mean > 0
    exponent = torch.where(alive, mean, torch.ones_like(mean)).log2()
    exponent = torch.where(alive, exponent - exponent[alive].mean(), torch.zeros_like(exponent))
    return torch.exp2((-strength * exponent).round().clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT))


def choose(rows: Tensor, mean: Tensor, weight: Tensor, table: SiteFormat, *, foldable: bool) -> Choice:
    """Try every strength on `rows`, float32[n, inputs], and return the first of those with the least error.

    Args:
        mean: float32[inputs], mean magnitudes over all observations.
        weight: float[outputs, inputs].
        foldable: whether a norm in front can take the multiplier; otherwise only strength 0 is tried.
    """
    wide = weight.float()
    exact = rows @ wide.T
    choices = [_tried(rows, wide, exact, mean, table, s) for s in (STRENGTHS if foldable else STRENGTHS[:1])]
    return min(choices, key=lambda choice: choice.error)


def rounded(rows: Tensor) -> Choice:
    """For what becomes E4M3 codes without meeting a weight, float32[n, inputs]: no multiplier, its own error."""
    scale = e4m3.scale_for(rows.abs().amax())
    norm = rows.norm()
    got = e4m3.decode(e4m3.quantise(rows, scale)) * scale
    return Choice(0.0, None, float((got - rows).norm() / norm) if norm > 0 else 0.0)


def _tried(rows: Tensor, weight: Tensor, exact: Tensor, mean: Tensor, table: SiteFormat, strength: float) -> Choice:
    multiplier = multiplier_for(mean, strength) if strength else None
    x = rows if multiplier is None else rows * multiplier
    scale = None if table.activation == WIDE else input_scale(x.abs().amax(), table.activation)
    packed = PackedWeight(weight if multiplier is None else weight / multiplier, table, scale)
    got = packed.quantised_input(x) @ packed.decode().T
    norm = exact.norm()
    return Choice(strength, multiplier, float((got - exact).norm() / norm) if norm > 0 else 0.0)


def input_scale(largest: Tensor, activation: str) -> Tensor:
    """float32[1]: the scale under which inputs of magnitudes up to `largest` fit, in one of `ACTIVATIONS`."""
    return nvfp4.tensor_scale_for(largest) if activation == "nvfp4" else e4m3.scale_for(largest).reshape(1)
