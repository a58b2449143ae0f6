"""The keeper: takes a session's state out, and puts it back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from ..contract import Contract, Role
from .arena import Arena
from .capsule import NOTHING_AWAITED, Parked, SessionState
from .copier import CopyRegions, RegionCopier
from .layout import Layout, live_layout
from .noise import Noise
from .versions import VersionLedger
from .windows import Window

_CACHED_LAYOUTS = 64


class SessionBooks(NamedTuple):
    """What a session keeps beside the bytes of its buffers. Each is the session's own and changes with it.

    `unfilled` names the windows that no stage may read.
    """

    ledger: VersionLedger
    extents: dict[str, int]
    noise: Noise
    notes: dict[str, str]
    unfilled: set[str]


class StateKeeper:
    """Copies the regions of one arena and the bookkeeping around them.

    Between sessions that share an arena it copies back only the regions whose content differs. What moves a capsule is
    called in two steps, `copier` first, so that a GPU copies while the host keeps the books.
    """

    def __init__(
        self,
        contract: Contract,
        arena: Arena,
        windows: Mapping[str, Window],
        books: SessionBooks,
        copy_regions: CopyRegions,
    ) -> None:
        self._contract, self._arena = contract, arena
        self._ledger, self._extents, self._noise, self._notes, self._unfilled = books
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self.live: Layout | None = None
        """The layout of what is live at this moment, if it has been asked for; else `lay_out` tells."""
        self.left: object = None
        """What the session had before the last restore, if nobody has let it go since."""
        self.copier = RegionCopier(arena.storage, self.largest().nbytes, copy_regions)
        self._segments_of = _segments_of(contract)
        saved = self._segments_of.keys()
        self._mirrored = [w for name, w in windows.items() if name in saved and not w.in_place]

    def largest(self) -> Layout:
        """The layout with every extent at its maximum."""
        return live_layout(self._contract, self._arena.offsets, {e.name: e.maximum for e in self._contract.extents})

    def lay_out(self) -> Layout:
        """The layout of what is live at this moment, which is `live` from now on."""
        self.live = self._layout()
        return self.live

    def _layout(self, *, reserve: bool = False) -> Layout:
        key = (reserve, *self._extents.values())
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= _CACHED_LAYOUTS:
                self._layouts.clear()
            layout = live_layout(self._contract, self._arena.offsets, self._extents, reserve=reserve)
            self._layouts[key] = layout
        return layout

    def new_parked(self) -> Parked:
        """An empty place for `park`, on the arena's device."""
        nbytes = live_layout(self._contract, self._arena.offsets, self._extents, reserve=True).nbytes
        return Parked(torch.empty(nbytes, dtype=torch.uint8, device=self._arena.storage.device))

    def park(self, parked: Parked) -> None:
        """Save into `parked` what has changed since it was saved there last."""
        layout = self._layout(reserve=True)
        held = parked.state.ledger.contents if parked.state is not None else {}
        changed = self._differing(held)
        if changed:
            self.copier.gather(layout, parked.block, changed)
        parked.state, parked.layout = self.state(layout), layout

    def _differing(self, contents: Mapping[str, int]) -> int:
        """Mask of the segments whose buffer holds something else now than `contents` says."""
        now, mask = self._ledger.state.contents, 0
        for name, segments in self._segments_of.items():
            if contents.get(name) != now[name]:
                mask |= segments
        return mask

    def state(self, layout: Layout) -> SessionState:
        """Everything but the bytes, at the extents of `layout`, which are the session's."""
        return SessionState(
            self._ledger.save(),
            layout.extents,
            self._noise.state,
            self._notes.copy(),
            frozenset(self._unfilled) if self._unfilled else NOTHING_AWAITED,
        )

    def unpark(self, state: SessionState, layout: Layout, block: torch.Tensor) -> None:
        """Bring a parked state back, copying only what differs."""
        differing = self._differing(state.ledger.contents)
        if differing:
            self.copier.scatter(layout, block, differing)
        self.go_back(state, None)

    def go_back(self, state: SessionState, layout: Layout | None) -> None:
        """Bring everything but the bytes back, with which the live ones lie as `layout` says, if it is given."""
        self.left = self._ledger.state, self._noise.state
        for window in self._mirrored:
            window.outdated = True
        if layout is None or layout is not self.live:
            self._extents.update(state.extents)
            self.live = layout
        self._noise.go_back(state.generator)
        self._notes.clear()
        self._notes.update(state.notes)
        foreign = self._ledger.load(state.ledger)
        self._unfilled.clear()
        self._unfilled.update(state.unfilled, foreign)

    def touch_extent(self, name: str) -> None:
        """Other rows of the regions with live extent `name` are live now, so what they hold counts as new."""
        self.live = None
        for region in self._contract.regions:
            if region.live == name:
                self._ledger.renew(region.buffer)


def _segments_of(contract: Contract) -> dict[str, int]:
    """For each saved buffer, the mask of its segments in every layout of `contract`."""
    masks: dict[str, int] = {}
    for index, region in enumerate(contract.regions):
        masks[region.buffer] = masks.get(region.buffer, 0) | 1 << index
    return masks


def input_windows(contract: Contract) -> tuple[str, ...]:
    """Windows that the host fills."""
    return tuple(buffer.name for buffer in contract.buffers if buffer.filled_by_host)


def static_without_writer(contract: Contract) -> list[str]:
    """STATIC buffers that must be prepared by hand."""
    return [b.name for b in contract.buffers if b.role is Role.STATIC and b.name not in contract.writers]
