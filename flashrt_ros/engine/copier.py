"""Copying live regions between the arena and a packed block."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from .layout import Layout, Segment

CopyRegions = Callable[[torch.Tensor, torch.Tensor, Iterable[Segment], bool], None]
"""(arena bytes, packed bytes, segments, gather): one batched copy into the packed block, or out of it."""


def copy_with_torch(arena: torch.Tensor, packed: torch.Tensor, segments: Iterable[Segment], gather: bool) -> None:
    """One strided copy a region. The definition of what every faster copy must do."""
    for segment in segments:
        if not segment.nbytes:
            continue
        inside = arena.as_strided((segment.blocks, segment.live), (segment.pitch, 1), _start(arena, segment.source))
        outside = packed[segment.packed :][: segment.nbytes].view(segment.blocks, segment.live)
        if gather:
            outside.copy_(inside, non_blocking=True)
        else:
            inside.copy_(outside, non_blocking=True)


def _start(arena: torch.Tensor, source: int) -> int:
    return int(arena.storage_offset()) + source


class RegionCopier:
    """Moves capsules between one arena and packed blocks on the current stream.

    Args:
        arena: the arena's bytes, uint8[n].
        staging: largest packed block, in bytes; a GPU keeps that much device memory so that a block in host memory
            is filled by one contiguous copy.
        copy: the batched copy.
    """

    def __init__(self, arena: torch.Tensor, staging: int, copy: CopyRegions) -> None:
        self._arena = arena
        self._copy = copy
        on_gpu = arena.device.type == "cuda"
        self._staging = torch.empty(staging, dtype=torch.uint8, device=arena.device) if on_gpu else None

    def gather(self, layout: Layout, block: torch.Tensor, segments: Iterable[Segment] | None = None) -> None:
        """Arena to `block`: uint8[layout.nbytes], on the arena's device or in (pinned) host memory.

        With `segments`, only those are copied; the block must then lie on the arena's device.
        """
        near = self._near(block)
        self._copy(self._arena, near, layout.segments if segments is None else segments, True)
        if near is not block:
            block.copy_(near, non_blocking=True)

    def scatter(self, layout: Layout, block: torch.Tensor, segments: Iterable[Segment] | None = None) -> None:
        """`block` to the arena; only `segments` of the layout if given."""
        near = self._near(block)
        if near is not block:
            near.copy_(block, non_blocking=True)
        self._copy(self._arena, near, layout.segments if segments is None else segments, False)

    def _near(self, block: torch.Tensor) -> torch.Tensor:
        if self._staging is None or block.device == self._arena.device:
            return block
        return self._staging[: len(block)]
