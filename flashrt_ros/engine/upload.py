"""Large tensors from the host's memory, files mapped into it included, to a GPU."""

from __future__ import annotations

from functools import partial
from itertools import cycle, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .crew import SharedWork

_BLOCK = 32 << 20  # bytes of pinned memory that are filled while as many are sent
_PIECE = 4 << 20  # bytes of a block that one thread fills at a time
_BLOCKS = 2

Bytes = NDArray[np.uint8]


class Uploader:
    """Copies tensors to a GPU through pinned blocks: several cores fill one while the GPU fetches another.

    A copy that PyTorch makes of memory that is not pinned goes through blocks of the driver's, which one core fills: a
    tenth of what the GPU could take.

    Args:
        device: the GPU; its current stream carries the copies.
        block: bytes of a pinned block.
    """

    def __init__(self, device: torch.device, block: int = _BLOCK) -> None:
        self._device, self._block = device, block
        pinned = [torch.empty(block, dtype=torch.uint8, pin_memory=True) for _ in range(_BLOCKS)]
        self._blocks = cycle([(memory, torch.cuda.Event()) for memory in pinned])  # type: ignore[no-untyped-call]

    def __call__(self, tensor: Tensor) -> Tensor:
        """A contiguous copy of `tensor`, which is in the host's memory; what the stream does next finds it complete."""
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        source, target = as_bytes(tensor).numpy(), as_bytes(copy)
        stream = torch.cuda.current_stream(self._device)
        for start in range(0, len(source), self._block):
            part = source[start : start + self._block]
            memory, fetched = next(self._blocks)
            fetched.synchronize()  # the GPU has read what the block held before
            fill(memory.numpy(), part)
            target[start : start + len(part)].copy_(memory[: len(part)], non_blocking=True)
            fetched.record(stream)
        return copy


def as_bytes(tensor: Tensor) -> Tensor:
    """uint8 in one dimension: the bytes of `tensor` in the order of its values; a view where it is contiguous."""
    return tensor.contiguous().flatten().view(torch.uint8)


def fill(block: Bytes, source: Bytes, piece: int = _PIECE) -> None:
    """Copy `source` to the beginning of `block`, by several threads."""
    ends = pairwise([*range(0, len(source), piece), len(source)])
    # A copy leaves the interpreter to others meanwhile.
    SharedWork([partial(np.copyto, block[start:end], source[start:end]) for start, end in ends]).finish()
