"""The keeper: takes a session's state out, and puts it back."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

import torch

from ..contract import Contract, Role
from .arena import Arena
from .capsule import Parked, SessionState
from .copier import CopyRegions, RegionCopier
from .layout import Layout, live_layout
from .noise import Noise
from .versions import VersionLedger
from .windows import Window

_CACHED_LAYOUTS = 64


class StateKeeper:
    """Copies the regions of one arena and the bookkeeping around them.

    Between sessions that share an arena it copies back only the regions whose content differs.
    """

    def __init__(
        self,
        contract: Contract,
        arena: Arena,
        ledger: VersionLedger,
        windows: Mapping[str, Window],
        extents: dict[str, int],
        noise: Noise,
        notes: dict[str, str],
        copy_regions: CopyRegions,
    ) -> None:
        self._contract, self._arena, self._ledger = contract, arena, ledger
        self._extents, self._noise, self._notes = extents, noise, notes
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self._live: Layout | None = None
        self._copier = RegionCopier(arena.storage, self.largest().nbytes, copy_regions)
        self._segments_of = _segments_of(contract)
        self._all_segments = (1 << len(contract.regions)) - 1
        saved = self._segments_of.keys()
        self._inputs = input_windows(contract)
        self._mirrored = [w for name, w in windows.items() if name in saved and not w.in_place]

    def largest(self) -> Layout:
        """The layout with every extent at its maximum."""
        return live_layout(self._contract, self._arena.offsets, {e.name: e.maximum for e in self._contract.extents})

    def live(self) -> Layout:
        """The layout of what is live at this moment."""
        if self._live is None:
            self._live = self._layout()
        return self._live

    def _layout(self, *, reserve: bool = False) -> Layout:
        key = (reserve, *self._extents.values())
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= _CACHED_LAYOUTS:
                self._layouts.clear()
            layout = live_layout(self._contract, self._arena.offsets, self._extents, reserve=reserve)
            self._layouts[key] = layout
        return layout

    def save(self, layout: Layout, block: torch.Tensor, unfilled: AbstractSet[str]) -> SessionState:
        """Copy the live regions into `block` and return the rest of the state.

        The copy is enqueued first: a GPU works on it while the rest is collected.
        """
        self._copier.gather(layout, block, self._all_segments)
        return self._state(unfilled)

    def new_parked(self) -> Parked:
        """An empty place for `park`, on the arena's device."""
        nbytes = live_layout(self._contract, self._arena.offsets, self._extents, reserve=True).nbytes
        return Parked(torch.empty(nbytes, dtype=torch.uint8, device=self._arena.storage.device))

    def park(self, parked: Parked, unfilled: AbstractSet[str]) -> None:
        """Save into `parked` what has changed since it was saved there last."""
        layout = self._layout(reserve=True)
        held = parked.state.ledger.contents if parked.state is not None else {}
        changed = self._differing(held)
        if changed:
            self._copier.gather(layout, parked.block, changed)
        parked.state, parked.layout = self._state(unfilled), layout

    def _differing(self, contents: Mapping[str, int]) -> int:
        """Mask of the segments whose buffer holds something else now than `contents` says."""
        now, mask = self._ledger.contents, 0
        for name, segments in self._segments_of.items():
            if contents.get(name) != now[name]:
                mask |= segments
        return mask

    def _state(self, unfilled: AbstractSet[str]) -> SessionState:
        return SessionState(
            ledger=self._ledger.save(),
            extents=self._extents.copy(),
            generator=self._noise.state,
            notes=self._notes.copy(),
            unfilled=frozenset(unfilled),
        )

    def load(self, state: SessionState, layout: Layout, block: torch.Tensor) -> AbstractSet[str]:
        """Bring a saved state back; returns the input windows that must be filled before a stage may read them.

        The copy is enqueued first here too.
        """
        self._copier.scatter(layout, block, self._all_segments)
        return self._go_back(state)

    def unpark(self, state: SessionState, layout: Layout, block: torch.Tensor) -> AbstractSet[str]:
        """Like `load`, but copies only what differs."""
        differing = self._differing(state.ledger.contents)
        if differing:
            self._copier.scatter(layout, block, differing)
        return self._go_back(state)

    def _go_back(self, state: SessionState) -> AbstractSet[str]:
        for window in self._mirrored:
            window.mark_outdated()
        self._extents.update(state.extents)
        self._live = None
        self._noise.go_back(state.generator)
        self._notes.clear()
        self._notes.update(state.notes)
        foreign = self._ledger.load(state.ledger)
        return foreign.intersection(self._inputs) | state.unfilled

    def touch_extent(self, name: str) -> None:
        """Other rows of the regions with live extent `name` are live now, so what they hold counts as new."""
        self._live = None
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
