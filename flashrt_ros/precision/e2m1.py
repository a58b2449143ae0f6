"""FP4 E2M1: one sign bit, two exponent bits (bias 1), one mantissa bit; no infinity and no NaN.

The format is E2M1 of the OCP Microscaling Formats specification 1.0, section 5.3.3. Two codes share a byte: the element
of even index is in the low four bits, as the tensor cores and cuBLASLt read them.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

LARGEST = 6.0
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of codes 0 to 7; codes 8 to 15 are their negatives
_MIDPOINTS = tuple((a + b) / 2 for a, b in pairwise(MAGNITUDES))
_SIGN = 8


def encode(x: Tensor) -> Tensor:
    """uint8 codes (0 to 15) of float values: to nearest, ties to even; what is larger than 6 saturates.

    There is no code for NaN: whoever may have one must look before.
    """
    wide = x.float()
    code = torch.bucketize(wide.abs(), _bounds(wide.device), out_int32=True)
    return (code + _SIGN * wide.signbit()).to(torch.uint8)


def decode(codes: Tensor) -> Tensor:
    """float32 values of codes; exact. The upper four bits of a code are ignored."""
    return _values(codes.device)[(codes & 15).int()]


def pack(codes: Tensor) -> Tensor:
    """uint8[..., n] codes, n even → uint8[..., n / 2] bytes."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """uint8[..., n] bytes → uint8[..., 2 n] codes."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


@lru_cache(maxsize=8)
def _bounds(device: torch.device) -> Tensor:
    """The largest magnitude of each code but the last: a tie belongs to the even code."""
    points = torch.tensor(_MIDPOINTS)
    lower = torch.nextafter(points, torch.zeros_like(points))
    ties_go_down = torch.arange(len(points)) % 2 == 0
    return torch.where(ties_go_down, points, lower).to(device)


@lru_cache(maxsize=8)
def _values(device: torch.device) -> Tensor:
    magnitudes = torch.tensor(MAGNITUDES)
    return torch.cat((magnitudes, -magnitudes)).to(device)
