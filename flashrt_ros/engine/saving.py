"""The part of a session that saves its state and goes back to it.

Behind a decision the caches hold nothing of a snapshot's code, so that every call and every object costs a microsecond
or more. Hence the steps are written out here, and properties and context managers are left to what may take longer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from ..contract import Contract
from .capsule import Capsule, Parked, Tier, checked_capsule_name
from .errors import FingerprintError, StateError
from .graphs import GraphSet
from .keeper import StateKeeper
from .store import CapsuleStore
from .turn import Turn


class StateSaving(ABC):
    """Capsules and parking on top of a keeper. Legal at a stage boundary only, as the session's lock ensures."""

    contract: Contract
    device: torch.device
    _capsules: CapsuleStore | None
    _graphs: GraphSet | None
    _keeper: StateKeeper
    _driving: Turn

    @abstractmethod
    def _require_configured(self) -> object:
        """Raise StateError before configure and after close."""

    @property
    def capsules(self) -> CapsuleStore:
        """Where this session's snapshots are kept."""
        if self._capsules is None:
            self._capsules = CapsuleStore(self.device)
        return self._capsules

    def snapshot(self, name: str, *, description: str = "", keep: bool = False, replace: bool = False) -> Capsule:
        """Save the live state under `name`.

        On a GPU it returns when the copy is enqueued: whatever the stream does next cannot change what was saved, and a
        restore that follows on it finds the bytes. Sessions that share a store are driven on one stream.

        Raises:
            CapsuleNameError, CapsuleExistsError, BudgetFullError: nothing was changed.
        """
        self._driving.begin("snapshot")
        try:
            if self._graphs is None:
                self._require_configured()
            keeper = self._keeper
            layout = keeper.live or keeper.lay_out()
            store = self._capsules if self._capsules is not None else self.capsules
            held = store.place_of(name, layout.nbytes, replace)
            block, tier = store.make_room(name, layout.nbytes) if held is None else (held.block, held.tier)
            try:
                far = keeper.copier.gather(layout, block)  # first, so that a GPU copies while the rest is collected
                capsule = Capsule(name, self.contract, keeper.state(layout), layout, block, tier, description, keep)
                if far:
                    capsule.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    capsule.copied.record(torch.cuda.current_stream(self.device))
            except BaseException:
                store.give_up(name, block, tier)
                raise
            store.put(capsule)
            return capsule
        finally:
            self._driving.end()

    def capture(self, name: str, *, description: str = "", keep: bool = False) -> Capsule:
        """The live state as a capsule in memory of its own, outside the store; for writing it to a file."""
        with self._driving.begin("snapshot"):
            self._require_configured()
            keeper = self._keeper
            layout = keeper.live or keeper.lay_out()
            block = torch.empty(layout.nbytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
            keeper.copier.gather(layout, block)
            state = keeper.state(layout)
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
            return Capsule(
                checked_capsule_name(name), self.contract, state, layout, block, Tier.HOST, description, keep
            )

    def restore(self, name: str) -> Capsule:
        """Go back to the state saved under `name`: bytes, versions, noise generator, shape key and notes.

        Windows that the capsule does not hold (the images) must be filled before a stage reads them again. On a GPU it
        returns when the copy is enqueued, in front of the replays that follow.

        Raises:
            UnknownCapsuleError, FingerprintError: nothing was changed.
        """
        store = self._capsules if self._capsules is not None else self.capsules
        capsule = store.get(name)
        self.adopt(capsule)
        return capsule

    def fork(self, name: str, session: StateSaving) -> Capsule:
        """Bring `session`, which must run an equal contract, to the state saved under `name`."""
        store = self._capsules if self._capsules is not None else self.capsules
        capsule = store.get(name)
        session.adopt(capsule)
        return capsule

    def adopt(self, capsule: Capsule) -> None:
        """Go to the state that `capsule` holds; FingerprintError if it is of another contract."""
        if capsule.contract is not self.contract and capsule.fingerprint != self.contract.fingerprint:
            raise FingerprintError(capsule.name, self.contract.differences(capsule.contract))
        self._driving.begin("restore")
        try:
            if self._graphs is None:
                self._require_configured()
            keeper, layout = self._keeper, capsule.layout
            keeper.copier.scatter(layout, capsule.block)  # first here too
            keeper.go_back(capsule.state, layout)
        finally:
            self._driving.end()

    def new_parked(self) -> Parked:
        """A place for `park`; the only allocation that parking needs."""
        return self._keeper.new_parked()

    def park(self, parked: Parked) -> None:
        """Save the live state into `parked`, copying only what changed since it was last saved there."""
        with self._driving.begin("park"):
            self._require_configured()
            self._keeper.park(parked)

    def unpark(self, parked: Parked) -> None:
        """Go to the state that `parked` holds, copying only what differs."""
        if parked.state is None or parked.layout is None:
            raise StateError("nothing was parked there yet")
        with self._driving.begin("restore"):
            self._require_configured()
            self._keeper.unpark(parked.state, parked.layout, parked.block)

    def _let_go(self) -> None:
        """Free what snapshots and restores left behind.

        That touches every name and number of the books and some code of torch. A snapshot or a restore should not wait
        for it; when noise is drawn, a GPU is at work.
        """
        self._keeper.left = None
        if self._capsules is not None:
            self._capsules.replaced = None
