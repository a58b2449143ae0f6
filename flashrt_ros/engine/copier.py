"""Copying live regions between the arena and a packed block."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .layout import Layout, LayoutKey, Segment

Move = Callable[[torch.Tensor, bool], None]
"""(packed block, gather): enqueues one batched copy of certain segments into the block, or out of it."""

CopyRegions = Callable[[torch.Tensor, Sequence[Segment]], Move]
"""(arena bytes, segments): prepares the copy of these segments once, so that a call of the result has little to do."""

ALL_SEGMENTS = -1
"""The mask that chooses every segment of a layout."""

_PREPARED = 64  # moves; a session meets one for each prompt length, and a few more for parts of a layout


def copy_with_torch(arena: torch.Tensor, segments: Sequence[Segment]) -> Move:
    """One strided copy a region. The definition of what every faster copy must do."""
    pieces = [(_inside(arena, s), s.packed, s.packed + s.nbytes, (s.blocks, s.live)) for s in segments if s.nbytes]

    def move(packed: torch.Tensor, gather: bool) -> None:
        for inside, start, end, shape in pieces:
            outside = packed[start:end].view(shape)
            target, source = (outside, inside) if gather else (inside, outside)
            target.copy_(source, non_blocking=True)

    return move


def _inside(arena: torch.Tensor, segment: Segment) -> torch.Tensor:
    start = int(arena.storage_offset()) + segment.source
    return arena.as_strided((segment.blocks, segment.live), (segment.pitch, 1), start)


class RegionCopier:
    """Moves capsules between one arena and packed blocks, in the order of the current stream.

    A call returns when the copy is enqueued, not when it is done: what follows on the stream finds the bytes in their
    place, and a host that reads a block in pinned memory waits for the stream first.

    Args:
        arena: the arena's bytes, uint8[n].
        staging: largest packed block, in bytes; a GPU keeps that much device memory so that a block in host memory
            is filled by one contiguous copy.
        prepare: how copies are made.
    """

    def __init__(self, arena: torch.Tensor, staging: int, prepare: CopyRegions) -> None:
        self._arena = arena
        self._prepare = prepare
        self._moves: dict[tuple[LayoutKey, int], Move] = {}
        self._index = arena.get_device()  # -1 on a CPU
        on_gpu = arena.device.type == "cuda"
        self._staging = torch.empty(staging, dtype=torch.uint8, device=arena.device) if on_gpu else arena[:0]
        self._near = self._staging[:0]

    def gather(self, layout: Layout, block: torch.Tensor, mask: int = ALL_SEGMENTS) -> bool:
        """Arena to `block`: uint8[layout.nbytes], on the arena's device or in (pinned) host memory.

        Returns whether it leaves the device, so that a host which reads the block has to wait for it.

        Bit i of `mask` chooses segment i of the layout. Unless all are chosen, the block must lie on the arena's
        device.
        """
        move = self._moves.get((layout.key, mask)) or self._prepared(layout, mask)
        if self._index < 0 or block.get_device() == self._index:
            move(block, True)
            return False
        near = self._staged(block)
        move(near, True)
        block.copy_(near, non_blocking=True)
        return True

    def scatter(self, layout: Layout, block: torch.Tensor, mask: int = ALL_SEGMENTS) -> None:
        """`block` to the arena; only the segments that `mask` chooses, wherever the block lies."""
        move = self._moves.get((layout.key, mask)) or self._prepared(layout, mask)
        if self._index >= 0 and block.get_device() != self._index:
            near = self._staged(block)
            near.copy_(block, non_blocking=True)
            block = near
        move(block, False)

    def _staged(self, block: torch.Tensor) -> torch.Tensor:
        """Device memory of the block's size; the view of the last size is kept."""
        if self._near.numel() != block.numel():
            self._near = self._staging[: block.numel()]
        return self._near

    def _prepared(self, layout: Layout, mask: int) -> Move:
        if len(self._moves) >= _PREPARED:
            self._moves.clear()
        chosen = [segment for i, segment in enumerate(layout.segments) if mask >> i & 1]
        move = self._prepare(self._arena, chosen)
        self._moves[layout.key, mask] = move
        return move
