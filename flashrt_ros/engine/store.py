"""The capsule store: named capsules within a byte budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import count

import torch

from .capsule import Capsule, Tier, checked_capsule_name
from .errors import BudgetFullError, CapsuleExistsError, CapsuleKeptError, UnknownCapsuleError
from .placement import Demote, Evict, Placement, plan_placement
from .slab import Slab

DEFAULT_DEVICE_BYTES = 256 << 20
DEFAULT_HOST_BYTES = 256 << 20

_BEST = Tier.DEVICE  # by a name of this module, as looking into an enum class takes longer


class CapsuleStore:
    """Capsules by name, in two tiers that are allocated once.

    A new capsule goes to the device tier. When that is full, the least recently used capsules move to the host tier;
    when both are full, the least recently used one that is not marked `keep` is evicted and noted in `evicted`.
    A capsule that is marked `keep` is only ever dropped on request.

    Args:
        device: device of the sessions that the capsules come from.
        device_bytes: budget of the device tier.
        host_bytes: budget of the host tier (pinned memory beside a GPU).
    """

    def __init__(
        self,
        device: torch.device,
        device_bytes: int = DEFAULT_DEVICE_BYTES,
        host_bytes: int = DEFAULT_HOST_BYTES,
    ) -> None:
        self._device, self._on_gpu = device, device.type == "cuda"
        self._slabs = {
            Tier.DEVICE: Slab(device_bytes, device),
            Tier.HOST: Slab(host_bytes, torch.device("cpu"), pinned=self._on_gpu),
        }
        self._capsules: dict[str, Capsule] = {}
        self._uses = count(1)
        self.evicted: list[str] = []
        self.replaced: Capsule | None = None
        """The last one in whose place another was written, if nobody has let it go since."""

    def __len__(self) -> int:
        return len(self._capsules)

    def __contains__(self, name: object) -> bool:
        return name in self._capsules

    def used(self, tier: Tier) -> int:
        """Bytes in use in `tier`."""
        return self._slabs[tier].used

    def budget(self, tier: Tier) -> int:
        """Bytes that `tier` can hold."""
        return self._slabs[tier].nbytes

    def list(self) -> tuple[Capsule, ...]:
        """Every capsule, by name. Safe to call from another thread than the one that drives."""
        capsules = tuple(self._capsules.values())  # in one step, because the driving thread may add one meanwhile
        return tuple(sorted(capsules, key=lambda capsule: capsule.name))

    def get(self, name: str) -> Capsule:
        """The capsule called `name`, which becomes the most recently used; UnknownCapsuleError if there is none."""
        capsule = self._capsules.get(name)
        if capsule is None:
            checked_capsule_name(name)
            known = ", ".join(sorted(self._capsules)) or "none"
            raise UnknownCapsuleError(f"no capsule is called '{name}'; there are: {known}")
        capsule.last_use = next(self._uses)
        return capsule

    def add(
        self,
        name: str,
        nbytes: int,
        make: Callable[[torch.Tensor, Tier], Capsule],
        *,
        replace: bool = False,
    ) -> Capsule:
        """Make room for `nbytes`, let `make` fill the block, and keep the result under `name`.

        One that replaces another of its size takes its place, which then needs no room beside it.

        Raises:
            CapsuleNameError, CapsuleExistsError, BudgetFullError: nothing was changed.
        """
        held = self.place_of(name, nbytes, replace)
        block, tier = self.make_room(name, nbytes) if held is None else (held.block, held.tier)
        try:
            capsule = make(block, tier)
        except BaseException:
            self.give_up(name, block, tier)
            raise
        self.put(capsule)
        return capsule

    def require_room(self, name: str, nbytes: int, *, replace: bool = False) -> None:
        """Raise what `add` would raise for a capsule of `nbytes` bytes, without changing anything."""
        if self.place_of(name, nbytes, replace) is None:
            self._plan(name, nbytes)

    # -- the steps of `add`, for a session, which takes them itself -----------------------------------------------

    def place_of(self, name: str, nbytes: int, replace: bool) -> Capsule | None:
        """The capsule in whose place a new one of `nbytes` goes: it fits, and no better tier has room.

        None if the new one needs room of its own; CapsuleNameError or CapsuleExistsError if it may not be called so.
        """
        held = self._capsules.get(name)
        if held is None or not replace:
            self._require_new(name)
        elif held.layout.nbytes == nbytes and (held.tier is _BEST or nbytes > self._slabs[_BEST].nbytes):
            return held
        return None

    def put(self, capsule: Capsule) -> None:
        """Keep `capsule`, whose block is that of its place or of `make_room`, instead of any other of its name."""
        name = capsule.name
        held = self._capsules.get(name)
        if held is not None:
            self.replaced = held
            if held.block is not capsule.block:
                self._forget(name)
        capsule.last_use = next(self._uses)
        self._capsules[name] = capsule

    def give_up(self, name: str, block: torch.Tensor, tier: Tier) -> None:
        """Free a block that was not filled to the end, and with it the capsule in whose place it lies."""
        held = self._capsules.get(name)
        if held is not None and held.block is block:  # some of its bytes may be of the new one
            self._forget(name)
        else:
            self._slabs[tier].give_back(block)

    def make_room(self, name: str, nbytes: int) -> tuple[torch.Tensor, Tier]:
        """A block for a capsule called `name`, for which others may move or go; BudgetFullError if none may."""
        for tier, slab in self._slabs.items():
            block = slab.take(nbytes)
            if block is not None:  # the usual case, for which no plan is needed
                return block, tier
            if nbytes <= slab.nbytes:  # what is there must move or go
                break
        plan = self._plan(name, nbytes)
        for step in plan.steps:
            if isinstance(step, Evict):
                self._forget(step.name)
                self.evicted.append(step.name)
            else:
                self._demote(step)
        block = self._slabs[plan.tier].take(nbytes)
        assert block is not None, "the plan was made on a copy of these very free lists"
        return block, plan.tier

    # -- other ways in and out ------------------------------------------------------------------------------------

    def insert(self, capsule: Capsule, *, replace: bool = False) -> Capsule:
        """Keep a copy of `capsule`, which may lie in memory of its own (as one that was read from a file does)."""

        def make(block: torch.Tensor, tier: Tier) -> Capsule:
            if self._on_gpu:  # the host must neither read what is still coming nor overwrite what is still leaving
                torch.cuda.synchronize(self._device)
            block.copy_(capsule.block)
            return dataclasses.replace(capsule, block=block, tier=tier, copied=None)

        return self.add(capsule.name, capsule.nbytes, make, replace=replace)

    def drop(self, name: str, *, drop_kept: bool = False) -> int:
        """Free the capsule called `name`; returns its bytes. CapsuleKeptError unless a kept one may go too."""
        capsule = self.get(name)
        if capsule.keep and not drop_kept:
            raise CapsuleKeptError(f"capsule '{name}' is marked keep; ask for dropping kept capsules to free it")
        self._forget(name)
        return capsule.nbytes

    def _require_new(self, name: str) -> None:
        if name in self._capsules:
            raise CapsuleExistsError(f"a capsule called '{name}' exists; drop it first, or ask to replace it")
        checked_capsule_name(name)

    def _plan(self, name: str, nbytes: int) -> Placement:
        free = {tier: slab.free for tier, slab in self._slabs.items()}
        offsets = {c.name: self._slabs[c.tier].offset(c.block) for c in self._capsules.values()}
        by_use = sorted(self._capsules.values(), key=lambda capsule: capsule.last_use)
        plan = plan_placement(nbytes, by_use, offsets, free)
        if plan is None:
            kept = sum(capsule.keep for capsule in self._capsules.values())
            raise BudgetFullError(
                f"no room for the {nbytes} bytes of capsule '{name}': {self.budget(Tier.DEVICE)} bytes on the device "
                f"and {self.budget(Tier.HOST)} on the host hold {len(self)} capsules, {kept} of them marked keep; "
                "drop one or raise the budget"
            )
        return plan

    def _demote(self, step: Demote) -> None:
        capsule = self._capsules[step.name]
        block = self._slabs[Tier.HOST].take(capsule.nbytes)
        assert block is not None, "the plan was made on a copy of these very free lists"
        block.copy_(capsule.block)  # synchronous: the device piece is reused at once, and files read the host piece
        self._slabs[Tier.DEVICE].give_back(capsule.block)
        capsule.block, capsule.tier = block, Tier.HOST

    def _forget(self, name: str) -> None:
        capsule = self._capsules.pop(name)
        self._slabs[capsule.tier].give_back(capsule.block)
