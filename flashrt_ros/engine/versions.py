"""Versions: how the engine knows what is stale."""

from __future__ import annotations

from itertools import count
from typing import NamedTuple

from ..contract import Contract, Rate, Role, Stage
from ..contract.graph import rate_of
from .errors import StaleInputError, StaleVariantError

_content_ids = count(1)  # unique in the process: two buffers with equal ids hold equal bytes


class LedgerState(NamedTuple):
    """What a ledger knew at one moment. `contents` is empty in a state that came from another process.

    The dicts are shared with the ledger until it next changes, so nobody may change them.
    """

    versions: dict[str, int]
    consumed: dict[str, tuple[int, ...] | None]
    ran_for: dict[str, str]
    variant: str
    contents: dict[str, int]


class VersionLedger:
    """A counter on every buffer, and for every stage the counters that it consumed.

    A stage is *stale* while it has never run, while one of its inputs has moved since, or while it ran for another
    shape key than the selected one.
    """

    def __init__(self, contract: Contract, variant: str) -> None:
        self.versions: dict[str, int] = {buffer.name: 0 for buffer in contract.buffers}
        self.contents: dict[str, int] = {buffer.name: next(_content_ids) for buffer in contract.buffers}
        self._saved = tuple(dict.fromkeys(region.buffer for region in contract.regions))
        self._unsaved = tuple(_volatile(contract).difference(self._saved))
        self.variant = variant
        self._inputs = {stage.name: contract.inputs(stage) for stage in contract.stages}
        self._writes = {stage.name: stage.writes for stage in contract.stages}
        self._shaped = {stage.name for stage in contract.stages if stage.variants}
        self._upstream = _upstream(contract)
        self._writers = {name: tuple(s.name for s in stages) for name, stages in contract.writers.items()}
        self._rerun = {name: self._writers[name] for name in self._unsaved if name in self._writers}  # who makes it
        self._consumed: dict[str, tuple[int, ...] | None] = dict.fromkeys(self._inputs)
        self._ran_for: dict[str, str] = {}
        self._shared = False  # whether a state has the very dicts

    def bump(self, buffer: str) -> None:
        """Record one write to `buffer`."""
        if self._shared:
            self._part()
        self.versions[buffer] += 1
        self.contents[buffer] = next(_content_ids)

    def renew(self, buffer: str) -> None:
        """Record that `buffer` holds something else now, without a write that readers would have to follow."""
        if self._shared:
            self._part()
        self.contents[buffer] = next(_content_ids)

    def is_stale(self, stage: str) -> bool:
        """Whether a replay of `stage` could change what it wrote; says nothing of the stages before it."""
        consumed = self._consumed[stage]
        if consumed is None or consumed != self._current(stage):
            return True
        return stage in self._shaped and self._ran_for[stage] != self.variant

    def ran(self, stage: str) -> None:
        """Record a complete replay of `stage`."""
        if self._shared:
            self._part()
        for name in self._writes[stage]:
            self.bump(name)
        self._consumed[stage] = self._current(stage)  # after the writes: a stage is not stale by its own update
        self._ran_for[stage] = self.variant

    def failed(self, stage: str) -> None:
        """Record that a replay of `stage` broke off: what it wrote is worthless and so is what follows from it."""
        if self._shared:
            self._part()
        for name in self._writes[stage]:
            self.bump(name)
        self._consumed[stage] = None

    def save(self) -> LedgerState:
        """The ledger as it is now."""
        self._shared = True
        return LedgerState(self.versions, self._consumed, self._ran_for, self.variant, self.contents)

    def _part(self) -> None:
        """Leave the dicts to the states that have them."""
        self.versions, self.contents = self.versions.copy(), self.contents.copy()
        self._consumed, self._ran_for = self._consumed.copy(), self._ran_for.copy()
        self._shared = False

    def load(self, state: LedgerState) -> set[str]:
        """Go back to `state`, after the bytes of all regions have come back.

        A stage whose output did not come back must run again. Returns the buffers that hold something else than
        they did at `state`; of the windows among them the host must say what they hold, before a stage reads them.
        """
        then, contents = state.contents, self.contents.copy()
        known = map(then.__getitem__, self._saved) if then else _content_ids
        contents.update(zip(self._saved, known, strict=False))
        foreign = {name for name in self._unsaved if contents[name] != then.get(name)}
        self.versions, self.contents = state.versions, contents
        lost = [stage for name in foreign.intersection(self._rerun) for stage in self._rerun[name]]
        self._consumed = state.consumed | dict.fromkeys(lost)
        self._ran_for, self.variant = state.ran_for, state.variant
        self._shared = True
        return foreign

    def require_fresh_inputs(self, stage: str) -> None:
        """Raise StaleInputError if a stage that feeds `stage` is itself stale."""
        for writer in self._upstream[stage]:
            self._require_fresh(f"stage '{stage}'", writer)

    def require_fresh(self, buffer: str) -> None:
        """Raise StaleInputError if a stage that `buffer` follows from is stale."""
        for writer in self._writers.get(buffer, ()):
            for upstream in (*self._upstream[writer], writer):
                self._require_fresh(f"reading '{buffer}'", upstream)

    def _require_fresh(self, reader: str, writer: str) -> None:
        if not self.is_stale(writer):
            return
        moved, consumed = self._moved_input(writer)
        if moved is None:
            raise StaleVariantError(reader, writer, self._ran_for[writer], self.variant)
        raise StaleInputError(reader, writer, moved, consumed, self.versions[moved])

    def _moved_input(self, stage: str) -> tuple[str | None, int | None]:
        consumed = self._consumed[stage]
        if consumed is None:
            name = self._inputs[stage][0] if self._inputs[stage] else self._writes[stage][0]
            return name, None
        for name, then in zip(self._inputs[stage], consumed, strict=True):
            if self.versions[name] != then:
                return name, then
        return None, None

    def _current(self, stage: str) -> tuple[int, ...]:
        versions = self.versions
        return tuple([versions[name] for name in self._inputs[stage]])


def _volatile(contract: Contract) -> frozenset[str]:
    """Buffers whose content an equal fingerprint does not already settle, and that matter after their stage."""
    return frozenset(
        buffer.name
        for buffer in contract.buffers
        if buffer.role is not Role.SCRATCH
        and (buffer.filled_by_host or rate_of(buffer, contract.writers) is not Rate.CHECKPOINT)
    )


def _upstream(contract: Contract) -> dict[str, tuple[str, ...]]:
    """For each stage, every stage that it follows from, in execution order."""
    direct: dict[str, set[Stage]] = {}
    reached: dict[str, set[str]] = {}
    for stage in contract.order:
        direct[stage.name] = {writer for group in contract.feeders(stage).values() for writer in group}
        earlier = [reached[writer.name] | {writer.name} for writer in direct[stage.name]]
        reached[stage.name] = set().union(*earlier)
    rank = {stage.name: i for i, stage in enumerate(contract.order)}
    return {name: tuple(sorted(names, key=rank.__getitem__)) for name, names in reached.items()}
