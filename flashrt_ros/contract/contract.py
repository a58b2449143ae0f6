"""The contract: the whole plan as checked, immutable data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from . import checks, codec
from .buffers import Buffer, checked_name
from .errors import ContractError
from .formats import SiteFormat
from .graph import execution_order, feeders_of, followers_of, inputs_of, writers_of
from .identity import Identity
from .regions import Extent, Region
from .stages import Stage, Variant

_T = TypeVar("_T")


@dataclass(frozen=True)
class Contract:
    """Buffers, stages, regions, formats and identity of one policy on one device.

    Construction runs every check and raises ContractError with the culprit's name. An empty `variants` stands for
    one shape key named "default". `formats` names the sites that are not in the policy's own type; the others are.
    """

    name: str
    buffers: tuple[Buffer, ...]
    stages: tuple[Stage, ...]
    identity: Identity
    regions: tuple[Region, ...] = ()
    extents: tuple[Extent, ...] = ()
    variants: tuple[Variant, ...] = field(default=(Variant("default"),))
    formats: tuple[SiteFormat, ...] = ()

    def __post_init__(self) -> None:
        checked_name("contract", self.name)
        for attribute in ("buffers", "stages", "regions", "extents", "variants", "formats"):
            object.__setattr__(self, attribute, tuple(getattr(self, attribute)))
        if not self.variants:
            object.__setattr__(self, "variants", (Variant("default"),))
        self._check()

    def _check(self) -> None:
        for kind, items in self._named_parts().items():
            checks.check_unique(kind, (item.name for item in items))
        if not self.stages:
            raise ContractError(f"contract '{self.name}' has no stage, so there is nothing to run")
        checks.check_references(self.stages, self._buffers)
        checks.check_writers(self.writers, self._buffers)
        checks.check_prerequisites(self.stages, self._buffers, self.writers)
        checks.check_rates(self.stages, self._buffers, self.writers)
        checks.check_regions(self.regions, self._extents, self._buffers)
        checks.check_variants(self)
        execution_order(self.stages, self.writers)

    def _named_parts(
        self,
    ) -> dict[str, tuple[Buffer | Stage | Region | Extent | Variant | SiteFormat, ...]]:
        return {
            "buffer": self.buffers,
            "stage": self.stages,
            "region": self.regions,
            "extent": self.extents,
            "variant": self.variants,
            "site": self.formats,
        }

    @cached_property
    def _buffers(self) -> dict[str, Buffer]:
        return {buffer.name: buffer for buffer in self.buffers}

    @cached_property
    def _stages(self) -> dict[str, Stage]:
        return {stage.name: stage for stage in self.stages}

    @cached_property
    def _extents(self) -> dict[str, Extent]:
        return {extent.name: extent for extent in self.extents}

    @cached_property
    def _variants(self) -> dict[str, Variant]:
        return {variant.name: variant for variant in self.variants}

    @cached_property
    def writers(self) -> Mapping[str, tuple[Stage, ...]]:
        """Stages that write each buffer, slowest first; a buffer that no stage writes is absent."""
        return writers_of(self.stages)

    @cached_property
    def order(self) -> tuple[Stage, ...]:
        """Stages in execution order."""
        return execution_order(self.stages, self.writers)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256, in hexadecimal, over the canonical JSON of everything but the documentation strings."""
        return codec.fingerprint(self)

    def buffer(self, name: str) -> Buffer:
        """The buffer called `name`; ContractError if there is none."""
        return _find("buffer", name, self._buffers)

    def stage(self, name: str) -> Stage:
        """The stage called `name`; ContractError if there is none."""
        return _find("stage", name, self._stages)

    def extent(self, name: str) -> Extent:
        """The extent called `name`; ContractError if there is none."""
        return _find("extent", name, self._extents)

    def variant(self, name: str) -> Variant:
        """The shape key called `name`; ContractError if there is none."""
        return _find("variant", name, self._variants)

    def inputs(self, stage: Stage) -> tuple[str, ...]:
        """Buffers whose change makes `stage` stale."""
        return inputs_of(stage, self.writers)

    def feeders(self, stage: Stage) -> Mapping[str, tuple[Stage, ...]]:
        """Stages that must have written each input of `stage` before it runs."""
        return feeders_of(stage, self.writers)

    def followers(self, name: str) -> tuple[Stage, ...]:
        """Stages that must not run before buffer `name` holds what it should: its readers, and all that follow them."""
        return followers_of(self.buffer(name).name, self.order, self.writers)

    def differences(self, other: Contract) -> tuple[str, ...]:
        """Names of the identity fields and contract parts in which `other` differs; empty if fingerprints are equal."""
        return codec.differences(self, other)

    def to_json(self) -> str:
        """Canonical JSON: equal contracts give equal text."""
        return codec.to_json(self)

    @staticmethod
    def from_json(text: str) -> Contract:
        """Read what `to_json` wrote; ContractError if it is malformed, of another schema, or altered."""
        return codec.from_json(text)


def _find(kind: str, name: str, items: Mapping[str, _T]) -> _T:
    if name not in items:
        raise ContractError(checks.unknown(kind, name, items))
    return items[name]
