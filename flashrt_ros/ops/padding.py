"""Memory of matrices that a GPU multiplies: every size is rounded up to whole lines of a cache, with zeros behind it.

Rows that are no multiple of 128 bytes apart begin in the middle of a line, and their product takes longer. Whoever
multiplies takes the zeros along: they add nothing to a sum, the outputs of zero rows are zeros again where the bias
behind them is, and everything stays contiguous, as libraries want it. Everyone else sees the matrix alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

MULTIPLE = 128
"""Values: a line of 128 bytes in the narrowest type of operands, one byte."""

Shape = tuple[int, ...]


def padded_size(size: int) -> int:
    """The next multiple of 128."""
    return -(-size // MULTIPLE) * MULTIPLE


def padded_shape(shape: Sequence[int]) -> Shape:
    """Every size rounded up to the next multiple of 128."""
    return tuple(map(padded_size, shape))


def in_padded_memory(tensor: Tensor, shape: Shape, dtype: torch.dtype | None = None) -> Tensor:
    """The values of `tensor`, as `dtype` if it is given, as a view into zeros of `shape` that nothing else uses.

    Raises:
        ValueError: `shape` has another number of dimensions, or is smaller somewhere.
    """
    corner = _corner(tensor.shape, shape)
    view = torch.zeros(shape, dtype=dtype or tensor.dtype, device=tensor.device)[corner]
    return view.copy_(tensor)


def with_padding(tensor: Tensor, shape: Shape) -> Tensor:
    """`tensor` and the zeros behind it, contiguous, of `shape`: its own memory if that is of `in_padded_memory`,
    otherwise a copy.

    Raises:
        ValueError: as `in_padded_memory` does.
    """
    corner = _corner(tensor.shape, shape)
    if tensor.shape == shape and tensor.is_contiguous():
        return tensor
    size, strides = math.prod(shape) * tensor.element_size(), torch.empty(shape, device="meta").stride()
    if tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == size and tensor.stride() == strides:
        whole = tensor.as_strided(shape, strides)
        if not _behind(whole, corner):  # or it is a part of something else
            return whole
    padded = torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
    padded[corner].copy_(tensor)
    return padded


def _corner(sizes: Sequence[int], shape: Shape) -> tuple[slice, ...]:
    if len(sizes) != len(shape) or any(size > room for size, room in zip(sizes, shape, strict=True)):
        raise ValueError(f"{list(sizes)} has no room in {list(shape)}")
    return tuple(slice(size) for size in sizes)


def _behind(whole: Tensor, corner: tuple[slice, ...]) -> bool:
    """Whether anything but zeros is outside of `corner`."""
    return any(
        bool((whole.narrow(axis, part.stop, whole.shape[axis] - part.stop) != 0).any())
        for axis, part in enumerate(corner)
    )
