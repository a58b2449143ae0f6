"""Versions: how the engine knows what is stale."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from ..contract import Contract, Rate, Role, Stage
from ..contract.graph import rate_of
from .errors import StaleInputError, StaleVariantError

_content_ids = count(1)  # unique in the process: two buffers with equal ids hold equal bytes


@dataclass(slots=True)
class LedgerState:
    """What a ledger knows at one moment. The contents are empty in a state that came from another process.

    It is the ledger's own until the ledger next changes and takes a copy, so nobody else may change it.

    Args:
        contents: numbers of what the saved buffers hold; a restore takes them over.
        unsaved: those of the buffers that no restore changes, though what they hold matters after their stage.
    """

    versions: dict[str, int]
    consumed: dict[str, tuple[int, ...] | None]
    ran_for: dict[str, str]
    variant: str
    contents: dict[str, int]
    unsaved: dict[str, int]

    def copy(self) -> LedgerState:
        """An independent twin."""
        return LedgerState(
            self.versions.copy(),
            self.consumed.copy(),
            self.ran_for.copy(),
            self.variant,
            self.contents.copy(),
            self.unsaved.copy(),
        )


class VersionLedger:
    """A counter on every buffer, and for every stage the counters that it consumed.

    A stage is *stale* while it has never run, while one of its inputs has moved since, or while it ran for another
    shape key than the selected one.
    """

    def __init__(self, contract: Contract, variant: str) -> None:
        self._saved = tuple(dict.fromkeys(region.buffer for region in contract.regions))
        self.variant = variant
        self._inputs = {stage.name: contract.inputs(stage) for stage in contract.stages}
        self._writes = {stage.name: stage.writes for stage in contract.stages}
        self._shaped = {stage.name for stage in contract.stages if stage.variants}
        self._upstream = _upstream(contract)
        self._writers = {name: tuple(s.name for s in stages) for name, stages in contract.writers.items()}
        forgotten = _volatile(contract).difference(self._saved)  # by a capsule
        self._awaited = tuple(b.name for b in contract.buffers if b.filled_by_host and b.name in forgotten)
        remade = forgotten.intersection(self._writers)
        self._remade = tuple((name, dict.fromkeys(self._writers[name])) for name in remade)
        self._settled = _new_contents({buffer.name for buffer in contract.buffers}.difference(self._saved, forgotten))
        self.state = LedgerState(
            versions={buffer.name: 0 for buffer in contract.buffers},
            consumed=dict.fromkeys(self._inputs),
            ran_for={},
            variant=variant,
            contents=_new_contents(self._saved),
            unsaved=_new_contents(forgotten),
        )
        """What is known now, but for the shape key, which it gets when it is saved. Only the methods here change it."""
        self._shared = False  # whether somebody else has `state`, or dicts of it

    def content(self, buffer: str) -> int:
        """A number for what `buffer` holds. Where two of this process are equal, so are the bytes."""
        return self._contents_with(self.state, buffer)[buffer]

    def bump(self, buffer: str) -> None:
        """Record one write to `buffer`."""
        self._written(self._own(), (buffer,))

    def renew(self, buffer: str) -> None:
        """Record that `buffer` holds something else now, without a write that readers would have to follow."""
        self._contents_with(self._own(), buffer)[buffer] = next(_content_ids)

    def is_stale(self, stage: str) -> bool:
        """Whether a replay of `stage` could change what it wrote; says nothing of the stages before it."""
        state = self.state
        consumed = state.consumed[stage]
        if consumed is None or consumed != self._current(stage):
            return True
        return stage in self._shaped and state.ran_for[stage] != self.variant

    def ran(self, stage: str) -> None:
        """Record a complete replay of `stage`."""
        state = self._own()
        self._written(state, self._writes[stage])
        state.consumed[stage] = self._current(stage)  # after the writes: a stage is not stale by its own update
        state.ran_for[stage] = self.variant

    def failed(self, stage: str) -> None:
        """Record that a replay of `stage` broke off: what it wrote is worthless and so is what follows from it."""
        state = self._own()
        self._written(state, self._writes[stage])
        state.consumed[stage] = None

    def save(self) -> LedgerState:
        """The ledger as it is now."""
        if self.state.variant != self.variant:
            self._own().variant = self.variant
        self._shared = True
        return self.state

    def load(self, state: LedgerState) -> list[str]:
        """Go back to `state`, after the bytes of all regions have come back.

        A stage whose output did not come back must run again. Returns the windows that hold something else than
        they did at `state` and that the host must fill, before a stage reads them.
        """
        unsaved, then = self.state.unsaved, state.unsaved
        contents, consumed = state.contents or _new_contents(self._saved), state.consumed
        for name, never_ran in self._remade:
            if unsaved[name] != then.get(name):
                consumed = consumed | never_ran
        self.variant = state.variant
        self.state = LedgerState(state.versions, consumed, state.ran_for, state.variant, contents, unsaved)
        self._shared = True  # its dicts are
        return [name for name in self._awaited if unsaved[name] != then.get(name)]

    def _own(self) -> LedgerState:
        """The state, to be changed; one that somebody else has is left to them."""
        if self._shared:
            self.state = self.state.copy()
            self._shared = False
        return self.state

    def _written(self, state: LedgerState, buffers: Iterable[str]) -> None:
        versions = state.versions
        for name in buffers:
            versions[name] += 1
            self._contents_with(state, name)[name] = next(_content_ids)

    def _contents_with(self, state: LedgerState, buffer: str) -> dict[str, int]:
        """Where the number for `buffer` is."""
        if buffer in state.contents:
            return state.contents
        return state.unsaved if buffer in state.unsaved else self._settled

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
            raise StaleVariantError(reader, writer, self.state.ran_for[writer], self.variant)
        raise StaleInputError(reader, writer, moved, consumed, self.state.versions[moved])

    def _moved_input(self, stage: str) -> tuple[str | None, int | None]:
        consumed = self.state.consumed[stage]
        if consumed is None:
            name = self._inputs[stage][0] if self._inputs[stage] else self._writes[stage][0]
            return name, None
        for name, then in zip(self._inputs[stage], consumed, strict=True):
            if self.state.versions[name] != then:
                return name, then
        return None, None

    def _current(self, stage: str) -> tuple[int, ...]:
        versions = self.state.versions
        return tuple([versions[name] for name in self._inputs[stage]])


def _new_contents(buffers: Iterable[str]) -> dict[str, int]:
    return {name: next(_content_ids) for name in buffers}


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
