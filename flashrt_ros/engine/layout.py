"""Where a capsule's live bytes lie: in the arena, and packed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..contract import Contract, Region

PACKING = 16  # bytes; every packed segment starts at a multiple, so that a copy moves 16 bytes a thread


@dataclass(frozen=True)
class Segment:
    """The live part of one region: `blocks` pieces of `live` bytes, `pitch` bytes apart in the arena."""

    region: Region
    source: int
    pitch: int
    blocks: int
    live: int
    packed: int

    @property
    def nbytes(self) -> int:
        """Live bytes of all blocks."""
        return self.blocks * self.live


LayoutKey = tuple[int, ...]
"""Whether dead rows keep their places, then the live rows of each extent. It tells the layouts of a contract apart."""


@dataclass(frozen=True)
class Layout:
    """The live segments of a contract at certain extents, and the size of the packed block that holds them.

    States share `extents`, so nobody may change them.
    """

    segments: tuple[Segment, ...]
    nbytes: int
    key: LayoutKey
    extents: Mapping[str, int]


def live_layout(
    contract: Contract, offsets: Mapping[str, int], extents: Mapping[str, int], *, reserve: bool = False
) -> Layout:
    """Lay out every region of `contract`.

    Args:
        offsets: byte offset of each buffer in the arena.
        extents: live rows by extent name.
        reserve: place each segment as if all of its rows were live, so that its place does not move with the extents.
    """
    segments, end = [], 0
    for region in contract.regions:
        live = _live_bytes(contract, region, extents)
        segment = Segment(region, offsets[region.buffer] + region.offset, region.block_bytes, region.blocks, live, end)
        end += -(-(region.nbytes if reserve else segment.nbytes) // PACKING) * PACKING
        segments.append(segment)
    rows = {extent.name: extents[extent.name] for extent in contract.extents}
    return Layout(tuple(segments), end, (reserve, *rows.values()), rows)


def _live_bytes(contract: Contract, region: Region, extents: Mapping[str, int]) -> int:
    if region.live is None:
        return region.block_bytes
    return extents[region.live] * region.row_bytes(contract.extent(region.live))
