"""What the capsule services do, apart from ROS's side of them.

Bytes move in the worker's thread, between two decisions; files are written and read in the caller's, so that a slow
disk delays no decision. One request is served at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from ..engine import (
    Capsule,
    CapsuleError,
    CapsuleExistsError,
    CapsuleFolder,
    CapsuleStore,
    SessionManager,
    Tier,
    UnknownCapsuleError,
    UnknownSessionError,
)
from ..engine.capsule import checked_capsule_name
from ..policies import PolicyRunner
from .decisions import Decider
from .epochs import EpochCause, Epochs
from .worker import Worker

T = TypeVar("T")


class InactiveError(RuntimeError):
    """The node does not decide now, so there is no live state to save or to go back to."""


class NothingToSaveError(RuntimeError):
    """The session has not decided anything yet."""


@dataclass(frozen=True)
class Listed:
    """One capsule as the services tell of it. `tier` is None for one that is only in its file."""

    name: str
    description: str
    created_ns: int
    fingerprint: str
    notes: dict[str, str]
    nbytes: int
    tier: Tier | None
    keep: bool
    durable: bool


class CapsuleDesk:
    """Saves, restores, forks, lists and drops for one configured node.

    Args:
        runner: whose session is saved; its session must hold the store of the node.
        manager: of the sessions that share the runner's.
        folder: of durable capsules.
        decider: to be told what it follows after a restore.
        epochs: of the node.
        worker: whose thread owns the session.
        timeout: longest wait for the decision in flight (s); WorkerBusyError after it.
        clock: of the node, in ns.
    """

    def __init__(
        self,
        runner: PolicyRunner,
        manager: SessionManager,
        folder: CapsuleFolder,
        decider: Decider,
        epochs: Epochs,
        worker: Worker,
        timeout: float,
        clock: Callable[[], int],
    ) -> None:
        self._session, self._manager, self._folder = runner.session, manager, folder
        self._decider, self._epochs, self._clock = decider, epochs, clock
        self._worker, self._timeout = worker, timeout

    @property
    def store(self) -> CapsuleStore:
        """Capsules in memory."""
        return self._session.capsules

    @property
    def fingerprint(self) -> str:
        """Of the running contract."""
        return self._session.fingerprint

    @property
    def folder(self) -> CapsuleFolder:
        """Durable capsules."""
        return self._folder

    def snapshot(
        self, name: str, *, description: str, session: str, keep: bool, durable: bool, replace: bool
    ) -> Listed:
        """Save the live state of `session` (empty: the one that decides) under `name`."""
        checked_capsule_name(name)
        if durable and not replace and name in self._folder:
            raise CapsuleExistsError(f"a durable capsule called '{name}' exists; drop it first, or ask to replace it")

        def take() -> Capsule:
            self._require_active()
            self._require_resident(session)
            self._require_decided()
            self._write_notes()
            if not durable:
                return self._session.snapshot(name, description=description, keep=keep, replace=replace)
            capsule = self._session.capture(name, description=description, keep=keep)
            self.store.require_room(name, capsule.nbytes, replace=replace)
            return capsule

        capsule: Capsule = self._in_worker(take)
        if durable:
            self._folder.save(capsule)
            capsule = self._in_worker(lambda: self.store.insert(capsule, replace=replace))
        return self._listed(capsule)

    def restore(self, name: str, session: str) -> int:
        """Bring `session` (empty: the one that decides) back to capsule `name`; it decides from now on.

        Returns:
            The epoch that began.
        """
        capsule = self._find(name)

        def go() -> int:
            self._require_active()
            before = self._manager.resident
            self._manager.switch_to(session or before)
            try:
                self._session.adopt(capsule)
            except BaseException:
                self._manager.switch_to(before)
                raise
            return self._follow(EpochCause.RESTORE, name)

        return self._in_worker(go)

    def fork(self, name: str, session: str, *, switch_to: bool) -> int:
        """Open `session` from capsule `name` (empty: from the live state); returns the epoch that began, or 0."""
        checked_capsule_name(session)
        capsule = self._find(name) if name else None

        def go() -> int:
            self._require_active()
            before = self._manager.resident
            self._manager.open(session, fork=capsule is None)
            try:
                if capsule is not None:
                    self._manager.switch_to(session)
                    self._session.adopt(capsule)
            except BaseException:
                self._manager.switch_to(before)
                self._manager.close(session)
                raise
            self._manager.switch_to(session if switch_to else before)
            return self._follow(EpochCause.FORK, name) if switch_to else 0

        return self._in_worker(go)

    def drop(self, name: str, *, drop_kept: bool) -> int:
        """Free capsule `name` in memory and on disk; returns the bytes freed."""
        in_memory, on_disk = checked_capsule_name(name) in self.store, name in self._folder
        if not in_memory and not on_disk:
            raise UnknownCapsuleError(f"no capsule is called '{name}'; there are: {self._names()}")
        freed = 0
        if in_memory:
            freed += self._in_worker(lambda: self.store.drop(name, drop_kept=drop_kept))
        if on_disk:
            freed += self._folder.delete(name)
        return freed

    def count(self) -> int:
        """How many capsules there are, in memory and on disk."""
        return len({capsule.name for capsule in self.store.list()} | set(self._folder.names()))

    def list(self) -> list[Listed]:
        """Every capsule, by name; a file that cannot be read is listed with the reason as its description."""
        listed = {capsule.name: self._listed(capsule) for capsule in self.store.list()}
        for name in self._folder.names():
            if name not in listed:
                listed[name] = self._on_disk(name)
        return [listed[name] for name in sorted(listed)]

    # -- inside ----------------------------------------------------------------------------------------------------

    def _in_worker(self, job: Callable[[], T]) -> T:
        return self._worker.call(job, self._timeout)

    def _find(self, name: str) -> Capsule:
        """The capsule called `name`, from memory if it is there, else from its file."""
        checked_capsule_name(name)
        with suppress(UnknownCapsuleError):
            return self._in_worker(lambda: self.store.get(name))
        if name not in self._folder:
            raise UnknownCapsuleError(f"no capsule is called '{name}'; there are: {self._names()}")
        return self._folder.load(name)

    def _follow(self, cause: EpochCause, capsule: str) -> int:
        """Begin an epoch in which the decider follows what the session's state says."""
        return self._decider.continue_from(capsule, self._manager.resident, cause)

    def _write_notes(self) -> None:
        notes = {
            "session": self._manager.resident,
            "created_ns": self._clock(),
            "epoch": self._epochs.current,
            "chunk_id": self._epochs.last_chunk_id,
        }
        self._session.notes.update({key: str(value) for key, value in notes.items()})

    def _require_active(self) -> None:
        if not self._decider.is_open:
            raise InactiveError("the node is not active, so there is no live state; activate it first")

    def _require_resident(self, session: str) -> None:
        if session and session not in self._manager.names:
            raise UnknownSessionError(
                f"no session called '{session}' is open; open are: {', '.join(self._manager.names)}"
            )
        if session and session != self._manager.resident:
            raise UnknownSessionError(
                f"session '{session}' does not decide now, '{self._manager.resident}' does; fork or restore to switch"
            )

    def _require_decided(self) -> None:
        if "observation" not in self._session.notes:
            raise NothingToSaveError("the session has not decided anything yet; wait for its first chunk")

    def _names(self) -> str:
        return ", ".join(sorted({c.name for c in self.store.list()} | set(self._folder.names()))) or "none"

    def _listed(self, capsule: Capsule) -> Listed:
        return Listed(
            capsule.name,
            capsule.description,
            capsule.created_ns,
            capsule.fingerprint,
            dict(capsule.notes),
            capsule.nbytes,
            capsule.tier,
            capsule.keep,
            capsule.name in self._folder,
        )

    def _on_disk(self, name: str) -> Listed:
        try:
            told = self._folder.describe(name)
        except CapsuleError as error:
            return Listed(name, f"unreadable: {error}", 0, "", {}, 0, None, keep=False, durable=True)
        return Listed(
            name,
            told.description,
            told.created_ns,
            told.fingerprint,
            dict(told.notes),
            told.nbytes,
            None,
            told.keep,
            True,
        )
