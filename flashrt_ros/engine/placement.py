"""Deciding where a new capsule goes, and what must move or go for it, before anything is touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .capsule import Capsule, Tier
from .slab import FreeList


@dataclass(frozen=True)
class Evict:
    """Forget a capsule."""

    name: str


@dataclass(frozen=True)
class Demote:
    """Move a capsule from the device to the host tier."""

    name: str


@dataclass(frozen=True)
class Placement:
    """Steps to take in order, after which the new capsule fits into `tier`."""

    tier: Tier
    steps: tuple[Evict | Demote, ...]


def plan_placement(
    nbytes: int,
    capsules: Sequence[Capsule],
    offsets: Mapping[str, int],
    free: Mapping[Tier, FreeList],
) -> Placement | None:
    """A way to fit `nbytes`, or None if that would cost a capsule that is marked keep.

    Args:
        capsules: least recently used first.
        offsets: where each capsule's block begins in its tier.
        free: bookkeeping of both tiers; it is copied, not changed.
    """
    for tier in Tier:
        planner = _Planner(capsules, offsets, free)
        if planner.make_room(tier, nbytes) is not None:
            return Placement(tier, tuple(planner.steps))
    return None


class _Planner:
    """Plays the moves on copies of the free lists."""

    def __init__(self, capsules: Sequence[Capsule], offsets: Mapping[str, int], free: Mapping[Tier, FreeList]) -> None:
        self.steps: list[Evict | Demote] = []
        self._free = {tier: freelist.copy() for tier, freelist in free.items()}
        self._offsets = dict(offsets)
        self._held = {t: [c for c in capsules if c.tier is t] for t in Tier}

    def make_room(self, tier: Tier, nbytes: int) -> int | None:
        """Offset of a free piece in `tier` after moving and evicting as needed; None if that is not enough."""
        if nbytes > self._free[tier].nbytes:
            return None
        victims = list(self._held[tier])
        while (offset := self._free[tier].take(nbytes)) is None:
            if not victims:
                return None
            self._clear(victims.pop(0))
        return offset

    def _clear(self, victim: Capsule) -> None:
        """Free the victim's piece: by demotion if it can be, else by eviction unless it is kept."""
        tier = Tier.DEVICE if victim in self._held[Tier.DEVICE] else Tier.HOST
        moved_to = self.make_room(Tier.HOST, victim.nbytes) if tier is Tier.DEVICE else None
        if moved_to is None and victim.keep:
            return
        self._free[tier].give_back(self._offsets[victim.name])
        self._held[tier].remove(victim)
        if moved_to is None:
            self.steps.append(Evict(victim.name))
            return
        self._offsets[victim.name] = moved_to
        self._held[Tier.HOST].append(victim)
        self.steps.append(Demote(victim.name))
