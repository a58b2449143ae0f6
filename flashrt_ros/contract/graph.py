"""The stage graph: who writes what, what feeds whom, and in which order stages run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter

from .buffers import Buffer, Rate
from .errors import ContractError
from .stages import Stage


def writers_of(stages: Iterable[Stage]) -> dict[str, tuple[Stage, ...]]:
    """Map each written buffer to the stages that write it, slowest first."""
    found: dict[str, list[Stage]] = {}
    for stage in stages:
        for name in stage.writes:
            found.setdefault(name, []).append(stage)
    return {name: tuple(sorted(group, key=lambda stage: stage.rate)) for name, group in found.items()}


def inputs_of(stage: Stage, writers: Mapping[str, tuple[Stage, ...]]) -> tuple[str, ...]:
    """Buffers whose change makes `stage` stale.

    These are its reads, and those of its writes that a slower stage writes too: when the slower stage has run again,
    the faster stage's value has been overwritten.
    """
    overwritten = [
        name
        for name in stage.writes
        if name not in stage.reads and any(writer.rate < stage.rate for writer in writers[name])
    ]
    return (*stage.reads, *overwritten)


def feeders_of(stage: Stage, writers: Mapping[str, tuple[Stage, ...]]) -> dict[str, tuple[Stage, ...]]:
    """Map each input of `stage` to the other stages that must have written it before."""
    feeders: dict[str, tuple[Stage, ...]] = {}
    for name in inputs_of(stage, writers):
        earlier = tuple(w for w in writers.get(name, ()) if w.name != stage.name and _comes_first(w, stage, name))
        if earlier:
            feeders[name] = earlier
    return feeders


def _comes_first(writer: Stage, reader: Stage, name: str) -> bool:
    # Two stages that both write `name` are ordered by rate; a pure reader comes after every writer.
    return writer.rate < reader.rate or name not in reader.writes


def followers_of(name: str, order: Iterable[Stage], writers: Mapping[str, tuple[Stage, ...]]) -> tuple[Stage, ...]:
    """Stages of `order` (an execution order) whose work depends on buffer `name`, directly or through other stages."""
    found: dict[str, Stage] = {}
    for stage in order:
        feeding = {writer.name for group in feeders_of(stage, writers).values() for writer in group}
        if name in inputs_of(stage, writers) or found.keys() & (feeding | set(stage.after)):
            found[stage.name] = stage
    return tuple(found.values())


def rate_of(buffer: Buffer, writers: Mapping[str, tuple[Stage, ...]]) -> Rate:
    """How often the content of `buffer` may change."""
    if buffer.rate is not None:
        return buffer.rate
    return max((stage.rate for stage in writers.get(buffer.name, ())), default=Rate.CHECKPOINT)


def execution_order(stages: tuple[Stage, ...], writers: Mapping[str, tuple[Stage, ...]]) -> tuple[Stage, ...]:
    """Stages in an order that satisfies every dependency: slower rates first, then as declared.

    Raises ContractError with the stages of a cycle, if there is one.
    """
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for stage in stages:
        feeding = {writer.name for group in feeders_of(stage, writers).values() for writer in group}
        sorter.add(stage.name, *feeding, *stage.after)
    try:
        sorter.prepare()
    except CycleError as error:
        path = " -> ".join(reversed(error.args[1]))
        raise ContractError(f"stages form a cycle: {path}; let one of them read an earlier value instead") from None
    return _stable_order(sorter, stages)


def _stable_order(sorter: TopologicalSorter[str], stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    rank = {stage.name: (stage.rate, index) for index, stage in enumerate(stages)}
    by_name = {stage.name: stage for stage in stages}
    ready: list[str] = list(sorter.get_ready())
    order: list[Stage] = []
    while ready:
        ready.sort(key=rank.__getitem__)
        name = ready.pop(0)
        order.append(by_name[name])
        sorter.done(name)
        ready.extend(sorter.get_ready())
    return tuple(order)
