"""Every reason to refuse a contract, one function each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from itertools import pairwise
from typing import TYPE_CHECKING

from .buffers import Buffer, Rate, Role
from .errors import ContractError
from .graph import rate_of
from .regions import Extent, Region
from .stages import Stage

if TYPE_CHECKING:
    from .contract import Contract

Writers = Mapping[str, tuple[Stage, ...]]


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """Text for a name that is not among `known`, with the nearest or all of the known ones."""
    names = sorted(known)
    close = get_close_matches(name, names, n=1)
    hint = f"did you mean '{close[0]}'?" if close else f"known: {', '.join(names) or 'none'}"
    return f"unknown {kind} '{name}'; {hint}"


def check_unique(kind: str, names: Iterable[str]) -> None:
    """Two things of one kind may not share a name."""
    for name, count in Counter(names).items():
        if count > 1:
            raise ContractError(f"{kind} '{name}' is declared {count} times; give each its own name")


def check_references(stages: Iterable[Stage], buffers: Mapping[str, Buffer]) -> None:
    """Stages name known buffers and known stages."""
    known_stages = {stage.name: stage for stage in stages}
    for stage in known_stages.values():
        for name in (*stage.reads, *stage.writes):
            if name not in buffers:
                raise ContractError(f"stage '{stage.name}': {unknown('buffer', name, buffers)}")
        for name in stage.after:
            if name not in known_stages:
                raise ContractError(
                    f"stage '{stage.name}': missing prerequisite, {unknown('stage', name, known_stages)}"
                )
            if known_stages[name].rate > stage.rate:
                raise ContractError(
                    f"stage '{stage.name}' ({stage.rate.name}) comes after '{name}', which is faster "
                    f"({known_stages[name].rate.name}); a slower stage cannot wait for a faster one"
                )


def check_writers(writers: Writers, buffers: Mapping[str, Buffer]) -> None:
    """One writer a buffer and rate, and only writers that the role allows."""
    for name, stages in writers.items():
        for first, second in pairwise(stages):
            if first.rate == second.rate:
                raise ContractError(
                    f"buffer '{name}' has two writers at rate {first.rate.name}: '{first.name}' and '{second.name}'; "
                    "give one of them its own buffer"
                )
        for stage in stages:
            _check_role_allows(stage, buffers[name])


def _check_role_allows(stage: Stage, buffer: Buffer) -> None:
    if buffer.filled_by_host:
        raise ContractError(
            f"stage '{stage.name}' writes '{buffer.name}', a window that the host fills; drop its rate or write "
            "elsewhere"
        )
    if buffer.role is Role.STATIC and stage.rate > Rate.PROMPT:
        raise ContractError(
            f"stage '{stage.name}' ({stage.rate.name}) writes STATIC buffer '{buffer.name}'; only CHECKPOINT and "
            "PROMPT stages may, make the buffer STATE or SCRATCH"
        )


def check_prerequisites(stages: Iterable[Stage], buffers: Mapping[str, Buffer], writers: Writers) -> None:
    """Everything that is read is filled by somebody, and scratch never crosses a stage boundary."""
    for stage in stages:
        for name in stage.reads:
            buffer = buffers[name]
            others = [w.name for w in writers.get(name, ()) if w.name != stage.name]
            if buffer.role is not Role.STATIC and not buffer.filled_by_host and not writers.get(name):
                raise ContractError(
                    f"stage '{stage.name}': missing prerequisite, no stage writes {buffer.role.name} buffer '{name}'"
                    + (" and it has no rate at which the host fills it" if buffer.role is Role.SWAP else "")
                )
            if buffer.role is Role.SCRATCH and others:
                raise ContractError(
                    f"stage '{stage.name}' reads SCRATCH buffer '{name}' of stage '{others[0]}'; a capsule would lose "
                    "it, make it STATE"
                )


def check_rates(stages: Iterable[Stage], buffers: Mapping[str, Buffer], writers: Writers) -> None:
    """No stage reads a value that changes faster than the stage itself."""
    for stage in stages:
        for name in stage.reads:
            rate = rate_of(buffers[name], writers)
            if rate > stage.rate:
                raise ContractError(
                    f"stage '{stage.name}' ({stage.rate.name}) reads '{name}', which changes faster ({rate.name}); "
                    f"raise the stage's rate to {rate.name} or read a slower value"
                )


def check_regions(
    regions: Iterable[Region],
    extents: Mapping[str, Extent],
    buffers: Mapping[str, Buffer],
) -> None:
    """Regions lie inside their buffers, do not overlap, and cover every STATE buffer somewhere."""
    last: dict[str, Region] = {}
    for region in sorted(regions, key=lambda r: (r.buffer, r.offset)):
        _check_region(region, extents, buffers)
        before = last.get(region.buffer)
        if before is not None and before.end > region.offset:
            raise ContractError(
                f"regions '{before.name}' and '{region.name}' overlap in buffer '{region.buffer}': "
                f"bytes [{before.offset}, {before.end}) and [{region.offset}, {region.end})"
            )
        last[region.buffer] = region
    for buffer in buffers.values():
        if buffer.role is Role.STATE and buffer.name not in last:
            raise ContractError(
                f"STATE buffer '{buffer.name}' has no region, so a capsule would lose it; add one or make it SCRATCH"
            )


def _check_region(region: Region, extents: Mapping[str, Extent], buffers: Mapping[str, Buffer]) -> None:
    if region.buffer not in buffers:
        raise ContractError(f"region '{region.name}': {unknown('buffer', region.buffer, buffers)}")
    buffer = buffers[region.buffer]
    if buffer.role is Role.SCRATCH:
        raise ContractError(f"region '{region.name}' saves SCRATCH buffer '{buffer.name}', whose content is worthless")
    if region.end > buffer.nbytes:
        raise ContractError(
            f"region '{region.name}' covers bytes [{region.offset}, {region.end}) of buffer '{buffer.name}', "
            f"which has only {buffer.nbytes}"
        )
    if region.live is None:
        return
    if region.live not in extents:
        raise ContractError(f"region '{region.name}': {unknown('extent', region.live, extents)}")
    maximum = extents[region.live].maximum
    if region.block_bytes % maximum:
        raise ContractError(
            f"region '{region.name}': a block of {region.block_bytes} bytes does not divide into the {maximum} rows of "
            f"extent '{region.live}'"
        )


def check_variants(contract: Contract) -> None:
    """Every shape key is captured by every stage that depends on shapes, and no stage names a foreign one."""
    names = [variant.name for variant in contract.variants]
    for stage in contract.stages:
        for name in stage.variants:
            if name not in names:
                raise ContractError(f"stage '{stage.name}': {unknown('variant', name, names)}")
        missing = [name for name in names if stage.variants and name not in stage.variants]
        if missing:
            raise ContractError(
                f"shape '{missing[0]}' has no captured variant of stage '{stage.name}'; "
                "add it to the stage's variants or drop the shape"
            )
