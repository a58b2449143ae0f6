"""Stages: what is captured and replayed as one piece, and the shapes it is captured for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from .buffers import Rate, checked_name
from .errors import ContractError


@dataclass(frozen=True)
class Variant:
    """A shape key: one named choice of sizes, for which every shape-dependent stage is captured."""

    name: str
    dims: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checked_name("variant", self.name)
        for dim, size in self.dims.items():
            if not isinstance(size, int) or size <= 0:
                raise ContractError(
                    f"variant '{self.name}': dimension '{dim}' is {size!r}, expected a positive integer"
                )
        object.__setattr__(self, "dims", MappingProxyType(dict(sorted(self.dims.items()))))

    def __hash__(self) -> int:
        return hash((self.name, tuple(self.dims.items())))


@dataclass(frozen=True)
class Stage:
    """Work that reads buffers, writes buffers and changes at one rate.

    Dependencies follow from `reads` and `writes`; `after` adds an order that no buffer expresses. `variants` names
    the shape keys that the stage is captured for; an empty tuple means that its shapes never change, so that one
    capture serves every shape key.
    """

    name: str
    rate: Rate
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    doc: str = ""

    def __post_init__(self) -> None:
        checked_name("stage", self.name)
        for attribute in ("reads", "writes", "after", "variants"):
            names = tuple(getattr(self, attribute))
            object.__setattr__(self, attribute, names)
            repeated = sorted({name for name in names if names.count(name) > 1})
            if repeated:
                raise ContractError(f"stage '{self.name}': {attribute} lists '{repeated[0]}' twice, once is enough")
        if not self.writes:
            raise ContractError(f"stage '{self.name}' writes no buffer, so nothing could ever depend on it")
