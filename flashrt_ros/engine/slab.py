"""Slabs: one allocation each, handed out in pieces, so that taking a snapshot never allocates."""

from __future__ import annotations

from bisect import bisect

import torch

_ALIGNMENT = 256


class FreeList:
    """First-fit bookkeeping of `nbytes` bytes, without the memory itself."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes // _ALIGNMENT * _ALIGNMENT
        self.taken: dict[int, int] = {}
        self._holes: list[tuple[int, int]] = [(0, self.nbytes)] if self.nbytes else []

    def copy(self) -> FreeList:
        """An independent copy, to plan on."""
        twin = FreeList(0)
        twin.nbytes, twin.taken, twin._holes = self.nbytes, dict(self.taken), list(self._holes)
        return twin

    def take(self, nbytes: int) -> int | None:
        """Offset of a piece of at least `nbytes`, or None if no hole is large enough."""
        size = max(_ALIGNMENT, -(-nbytes // _ALIGNMENT) * _ALIGNMENT)
        for index, (start, length) in enumerate(self._holes):
            if length >= size:
                self._holes[index : index + 1] = [(start + size, length - size)] if length > size else []
                self.taken[start] = size
                return start
        return None

    def give_back(self, offset: int) -> None:
        """Free the piece at `offset`."""
        holes, start, end = self._holes, offset, offset + self.taken.pop(offset)
        first = last = bisect(holes, (offset,))
        if first and sum(holes[first - 1]) == start:
            first -= 1
            start = holes[first][0]
        if last < len(holes) and holes[last][0] == end:
            end += holes[last][1]
            last += 1
        holes[first:last] = [(start, end - start)]


class Slab:
    """`nbytes` of memory on `device` (pinned, if it is host memory beside a GPU), handed out in pieces."""

    def __init__(self, nbytes: int, device: torch.device, *, pinned: bool = False) -> None:
        self.free = FreeList(nbytes)
        self._memory = torch.empty(self.free.nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)
        self._pieces: dict[int, torch.Tensor] = {}  # the last one at each offset: slicing costs more than finding it

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return self.free.nbytes

    @property
    def used(self) -> int:
        """Bytes handed out, with alignment."""
        return sum(self.free.taken.values())

    def take(self, nbytes: int) -> torch.Tensor | None:
        """uint8[nbytes], or None if no hole is large enough."""
        offset = self.free.take(nbytes)
        if offset is None:
            return None
        piece = self._pieces.get(offset)
        if piece is None or piece.numel() != nbytes:
            piece = self._pieces[offset] = self._memory[offset : offset + nbytes]
        return piece

    def offset(self, piece: torch.Tensor) -> int:
        """Where a piece that `take` returned begins."""
        return int(piece.storage_offset())

    def give_back(self, piece: torch.Tensor) -> None:
        """Make a piece that `take` returned available again."""
        self.free.give_back(self.offset(piece))
