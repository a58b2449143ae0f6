"""The arena: one allocation that holds every buffer at an address that never changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from ..contract import Contract
from .dtypes import TORCH_DTYPE
from .errors import DeviceError

ALIGNMENT = 256  # bytes; what CUDA's own allocator promises, so that every vector load is aligned


class Arena(Mapping[str, torch.Tensor]):
    """Buffers of `contract` as tensors over one zeroed allocation on `device`.

    Raises DeviceError if the device is absent or has too little memory.
    """

    def __init__(self, contract: Contract, device: torch.device) -> None:
        self.offsets, self.nbytes = arena_offsets(contract)
        self.storage = _allocate(self.nbytes, device)
        self._tensors = {
            b.name: self.storage[self.offsets[b.name] :][: b.nbytes].view(TORCH_DTYPE[b.dtype]).view(b.shape)
            for b in contract.buffers
        }

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def place(self, name: str, tensor: torch.Tensor) -> None:
        """Let buffer `name` be `tensor`, of its shape and type, outside the allocation; before anything is captured."""
        self._tensors[name] = tensor

    def address(self, name: str) -> int:
        """Address of the first byte of buffer `name`, on the arena's device."""
        return self._tensors[name].data_ptr()


def arena_offsets(contract: Contract) -> tuple[dict[str, int], int]:
    """Byte offset of every buffer in the arena of `contract`, and the arena's size. Equal contracts, equal offsets."""
    offsets, end = {}, 0
    for buffer in contract.buffers:
        offsets[buffer.name] = end
        end += -(-buffer.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, end


def _allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    try:
        padded = torch.zeros(nbytes + ALIGNMENT, dtype=torch.uint8, device=device)
    except (
        RuntimeError,
        AssertionError,
    ) as error:  # torch raises AssertionError when it was built without CUDA
        first_line = str(error).splitlines()[0]
        raise DeviceError(f"cannot allocate an arena of {nbytes} bytes on '{device}': {first_line}") from None
    shift = -padded.data_ptr() % ALIGNMENT
    return padded[shift : shift + nbytes]
