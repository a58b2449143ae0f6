"""Which formats a GPU can multiply."""

from __future__ import annotations

from ..contract import SiteFormat
from .errors import TierError

OLDEST = {"e4m3": (8, 9), "nvfp4": (10, 0)}
"""Compute capability from which tensor cores take activations of a format. A weight of any format can be decoded in
registers, so it asks for nothing by itself."""


def require_capability(formats: tuple[SiteFormat, ...], capability: tuple[int, int], tier: str) -> None:
    """TierError, with site and reason, if a GPU of `capability` cannot run one of `formats`."""
    for item in formats:
        oldest = OLDEST.get(item.activation, (0, 0))
        if capability < oldest:
            needed, found = (".".join(map(str, pair)) for pair in (oldest, capability))
            raise TierError(
                f"tier '{tier}', site '{item.name}': {item.activation} activations need compute capability {needed}, "
                f"this GPU has {found}; give the site 16-bit activations in a tier of your own, or set `fused: false` "
                "to simulate the tier slowly"
            )
