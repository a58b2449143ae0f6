"""Formats: in which precision the matrix product of each site is stored and computed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from .buffers import checked_name

WIDE = "16-bit"
"""The format of whatever is stored and read in the policy's own floating-point type."""


@dataclass(frozen=True)
class SiteFormat:
    """The formats of one site. A *site* is one matrix product of a policy, or one table that it looks up.

    Attributes:
        name: of the site, such as "prefix.gate_up.3".
        weight: in which the matrix is stored; "16-bit" or a format of `flashrt_ros.precision`.
        activation: in which its input enters the product.
    """

    name: str
    weight: str = WIDE
    activation: str = WIDE

    def __post_init__(self) -> None:
        checked_name("site", self.name)

    @property
    def wide(self) -> bool:
        """True if nothing here is narrower than the policy's own type."""
        return self.weight == WIDE and self.activation == WIDE


def summary(formats: tuple[SiteFormat, ...]) -> list[tuple[str, str, str]]:
    """Rows (weight, activation, how many sites), most frequent first."""
    counts = Counter((item.weight, item.activation) for item in formats)
    return [(weight, activation, f"{count} sites") for (weight, activation), count in counts.most_common()]
