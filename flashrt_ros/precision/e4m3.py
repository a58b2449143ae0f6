"""FP8 E4M3: one sign bit, four exponent bits (bias 7), three mantissa bits, no infinity.

The format is E4M3 of "FP8 Formats for Deep Learning" (Micikevicius et al., 2022): largest value 448, smallest normal
2^-6, smallest subnormal 2^-9, NaN only as all ones. A scaled value is `code * scale` with a float32 scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import PrecisionError

LARGEST = 448.0
SMALLEST = 2.0**-9  # the smallest value above zero
_LEAST_SCALE = 2.0**-100  # far below any activation; keeps the reciprocal of a scale finite
_ROWS = 2048  # of a weight at a time, so that a large table needs little memory


def encode(x: Tensor) -> Tensor:
    """uint8 codes of float values: to nearest, ties to even; what is larger than 448, infinity too, saturates.

    A NaN keeps the code of NaN, so that a fault upstream stays visible.
    """
    return x.float().clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)


def decode(codes: Tensor) -> Tensor:
    """float32 values of uint8 codes; exact."""
    return codes.view(torch.float8_e4m3fn).float()


def scale_for(largest: Tensor) -> Tensor:
    """float32 scales under which magnitudes up to `largest` fit: largest / 448, and 1 where there is only zero."""
    # A product, not a quotient: PyTorch divides by a number differently on a GPU, in the last bit.
    scale = (largest.float() * (1 / LARGEST)).clamp(min=_LEAST_SCALE)
    return torch.where(largest > 0, scale, torch.ones_like(scale))


def quantise(x: Tensor, scale: Tensor) -> Tensor:
    """uint8 codes of x / scale.

    The quotient is x times the float32 reciprocal of the scale, which is how a kernel computes it.
    """
    return encode(x.float() * scale.reciprocal())


def quantise_weight(weight: Tensor, *, by_channel: bool) -> tuple[Tensor, Tensor]:
    """Codes and scales of a weight matrix.

    Args:
        weight: float[outputs, inputs], finite.
        by_channel: one scale for each output, otherwise one for the matrix.

    Returns:
        uint8[outputs, inputs] and float32[outputs], or float32[1].

    Raises:
        PrecisionError: the matrix holds a value that is not finite.
    """
    parts = torch.split(weight, _ROWS)
    largest = torch.cat([part.float().abs().amax(1) for part in parts])
    if not by_channel:
        largest = largest.amax().reshape(1)
    if not bool(largest.isfinite().all()):
        raise PrecisionError("the weight holds a value that is not finite, so no scale fits it; check the checkpoint")
    scales = scale_for(largest)
    by_part = torch.split(scales[:, None], _ROWS) if by_channel else (scales,) * len(parts)
    return torch.cat([quantise(part, scale) for part, scale in zip(parts, by_part, strict=True)]), scales
