"""NVFP4: E2M1 values, one unsigned E4M3 scale for each 16 of them along a row, one float32 scale for the tensor.

A value is `code * block scale * tensor scale`. The tensor scale brings the block scales into the range of E4M3; its
definition (largest magnitude / (6 * 448)) is that of cuBLAS and of "Pretraining Large Language Models with NVFP4"
(NVIDIA, 2025). Rows are padded with zeros to whole blocks, and zeros stay zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from . import e2m1, e4m3
from .errors import PrecisionError

BLOCK = 16
_RANGE = e2m1.LARGEST * e4m3.LARGEST
_LEAST_SCALE = 2.0**-100
_TRIED = (1.0, 0.75, 0.8, 0.85, 0.9, 0.95, 1.1, 1.2, 1.3, 1.4, 1.5)  # of largest / 6, as block scales of a weight
_TOP = 256.0  # block scale of a weight's largest block: exact in E4M3, and 1.5 times it still fits
_ROWS = 2048  # of a weight at a time, so that trying scales needs little memory


@dataclass(frozen=True)
class Nvfp4:
    """A matrix in NVFP4.

    Attributes:
        packed: uint8[rows, 8 * blocks], two codes a byte.
        scales: uint8[rows, blocks], codes of E4M3 without sign.
        tensor_scale: float32[1].
        columns: of the matrix; the last block may be wider.
    """

    packed: Tensor
    scales: Tensor
    tensor_scale: Tensor
    columns: int

    def decode(self) -> Tensor:
        """float32[rows, columns]."""
        rows, blocks = self.scales.shape
        values = e2m1.decode(e2m1.unpack(self.packed)).view(rows, blocks, BLOCK)
        wide = values * (e4m3.decode(self.scales) * self.tensor_scale)[..., None]
        return wide.view(rows, -1)[:, : self.columns]


def tensor_scale_for(largest: Tensor) -> Tensor:
    """float32[1]: the tensor scale for magnitudes up to `largest`; 1 where there is only zero."""
    scale = (largest.float() * (1 / _RANGE)).clamp(min=_LEAST_SCALE)
    return torch.where(largest > 0, scale, torch.ones_like(scale)).reshape(1)


def quantise(x: Tensor, tensor_scale: Tensor) -> Nvfp4:
    """Quantise float[rows, columns] under a given tensor scale, with the block scales that its own blocks need.

    A block's scale is its largest magnitude / 6, in units of the tensor scale, rounded to nearest; it saturates at 448,
    and is at least 2^-9 where the block is not all zero. A NaN makes its block NaN.
    """
    blocks = _blocks(x)
    scales = _scales(blocks.abs().amax(-1) * (tensor_scale * e2m1.LARGEST).reciprocal())
    return _stored(blocks, scales, tensor_scale, x.shape[1])


def quantise_weight(weight: Tensor) -> Nvfp4:
    """Quantise a weight matrix float[outputs, inputs], with the block scales that lose least.

    Each block takes that one of several scales around largest / 6 under which the sum of squared errors is smallest;
    the first of equals. A coarser scale can win because E2M1 has nothing between 4 and 6.

    Raises:
        PrecisionError: the matrix holds a value that is not finite.
    """
    largest = weight.abs().amax().float()
    if not bool(largest.isfinite()):
        raise PrecisionError("the weight holds a value that is not finite, so no scale fits it; check the checkpoint")
    tensor_scale = tensor_scale_for(largest * (e4m3.LARGEST / _TOP))
    parts = [_least_loss(part, tensor_scale) for part in torch.split(weight, _ROWS)]
    return Nvfp4(
        torch.cat([part.packed for part in parts]), torch.cat([part.scales for part in parts]), tensor_scale,
        weight.shape[1],
    )  # fmt: skip


def _least_loss(x: Tensor, tensor_scale: Tensor) -> Nvfp4:
    blocks = _blocks(x)
    wanted = blocks.abs().amax(-1) * (tensor_scale * e2m1.LARGEST).reciprocal()
    best = _scales(wanted)
    loss = _loss(blocks, best, tensor_scale)
    for factor in _TRIED[1:]:
        scales = _scales(wanted * factor)
        other = _loss(blocks, scales, tensor_scale)
        best = torch.where(other < loss, scales, best)
        loss = torch.minimum(other, loss)
    return _stored(blocks, best, tensor_scale, x.shape[1])


def _loss(blocks: Tensor, scales: Tensor, tensor_scale: Tensor) -> Tensor:
    """Sum of squared errors of each block."""
    step = (e4m3.decode(scales) * tensor_scale)[..., None]
    return (e2m1.decode(_codes(blocks, scales, tensor_scale)) * step - blocks).square_().sum(-1)


def _blocks(x: Tensor) -> Tensor:
    """float32[rows, blocks, 16], padded with zeros."""
    return F.pad(x.float(), (0, -x.shape[1] % BLOCK)).view(len(x), -1, BLOCK)


def _scales(wanted: Tensor) -> Tensor:
    """Codes of block scales: those wanted, and 0 only where the block is all zero."""
    return e4m3.encode(torch.where(wanted > 0, wanted.clamp(min=e4m3.SMALLEST), wanted))


def _codes(blocks: Tensor, scales: Tensor, tensor_scale: Tensor) -> Tensor:
    step = e4m3.decode(scales) * tensor_scale
    inverse = torch.where(step > 0, step.reciprocal(), torch.zeros_like(step))
    return e2m1.encode(blocks * inverse[..., None])


def _stored(blocks: Tensor, scales: Tensor, tensor_scale: Tensor, columns: int) -> Nvfp4:
    packed = e2m1.pack(_codes(blocks, scales, tensor_scale)).view(len(blocks), -1)
    return Nvfp4(packed, scales, tensor_scale, columns)
