"""Regions: the bytes that a capsule saves, and how many of them are live."""

from __future__ import annotations

from dataclasses import dataclass

from .buffers import checked_name
from .errors import ContractError


@dataclass(frozen=True)
class Extent:
    """A row count that moves at run time between 0 and `maximum`, for example the rows of the prefix in use."""

    name: str
    maximum: int

    def __post_init__(self) -> None:
        checked_name("extent", self.name)
        if not isinstance(self.maximum, int) or self.maximum <= 0:
            raise ContractError(f"extent '{self.name}': maximum {self.maximum!r} is not a positive integer")


@dataclass(frozen=True)
class Region:
    """A byte range of one buffer.

    The range splits into `blocks` equal parts (for K/V: one a layer). With `live` set to an extent, each block holds
    `extent.maximum` rows and only the first `extent` rows of each block are copied; without it, all bytes are.
    """

    name: str
    buffer: str
    offset: int
    nbytes: int
    blocks: int = 1
    live: str | None = None

    def __post_init__(self) -> None:
        checked_name("region", self.name)
        if self.offset < 0 or self.nbytes <= 0 or self.blocks <= 0:
            raise ContractError(
                f"region '{self.name}': offset {self.offset}, nbytes {self.nbytes} and blocks {self.blocks} "
                "must be at least 0, 1 and 1"
            )
        if self.nbytes % self.blocks:
            raise ContractError(
                f"region '{self.name}': {self.nbytes} bytes do not divide into {self.blocks} equal blocks"
            )

    @property
    def end(self) -> int:
        """First byte of the buffer behind the region."""
        return self.offset + self.nbytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, live or not."""
        return self.nbytes // self.blocks

    def row_bytes(self, extent: Extent) -> int:
        """Bytes of one row of `extent` in one block."""
        return self.block_bytes // extent.maximum
