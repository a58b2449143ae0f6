"""Receipts: what was judged, with which result, on which model and machine; readable, and checked before it is used."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import ReceiptError
from .identity import differences

VERSION = 1
KEPT, REFUSED = "kept", "refused"
_PARTS = ("version", "model", "environment", "gates", "candidates", "search", "result", "digest")


@dataclass(frozen=True)
class Verdict:
    """The verdict on one candidate.

    Attributes:
        sites: what it replaces; `dropped`: places that fit but could not be prepared, with the reason.
        against: the form that it was timed against, "original" or the name of the graph around both.
        parity, latency: the gates' figures (None if it did not come so far).
        reason: why it is kept or refused.
    """

    name: str
    kind: str
    verdict: str
    reason: str
    sites: tuple[str, ...] = ()
    dropped: Mapping[str, str] = field(default_factory=dict)
    against: str = "original"
    parity: Mapping[str, Any] | None = None
    latency: Mapping[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**vars(self), "sites": list(self.sites), "dropped": dict(self.dropped)}


@dataclass(frozen=True)
class Receipt:
    """Everything that a search found out.

    Attributes:
        model, environment: see `identity`.
        gates: the limits.
        candidates: one verdict each.
        search: every set that was tried, and whether the search was complete.
        result: names of the kept set, its parity and its latency against the original.
    """

    model: dict[str, str]
    environment: dict[str, str]
    gates: dict[str, Any]
    candidates: tuple[Verdict, ...]
    search: dict[str, Any]
    result: dict[str, Any]

    @property
    def kept(self) -> tuple[str, ...]:
        """Names of the candidates that are active."""
        return tuple(self.result["kept"])

    @property
    def refused(self) -> dict[str, str]:
        """Name to reason of every other candidate."""
        return {v.name: v.reason for v in self.candidates if v.verdict == REFUSED}

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, with a digest over all of them."""
        values = {**vars(self), "version": VERSION, "candidates": [v.to_dict() for v in self.candidates]}
        return {**values, "digest": _digest(values)}

    def save(self, path: str | Path) -> None:
        """Write the receipt as JSON; never half of it."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        partial.write_text(json.dumps(self.to_dict(), indent=2) + "\n")
        partial.replace(target)

    @classmethod
    def load(cls, path: str | Path) -> Receipt:
        """Read a receipt; ReceiptError if it is unreadable, of another version, or not what was written."""
        try:
            values = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise ReceiptError(f"cannot read receipt '{path}': {error}; accelerate again to make a new one") from None
        return cls.from_dict(values, str(path))

    @classmethod
    def from_dict(cls, values: Any, where: str = "the receipt") -> Receipt:
        """The opposite of `to_dict`, with the checks of `load`."""
        missing = [part for part in _PARTS if not isinstance(values, dict) or part not in values]
        if missing:
            raise ReceiptError(f"'{where}' is no receipt: '{missing[0]}' is missing", missing[0])
        if values["version"] != VERSION:
            raise ReceiptError(f"'{where}' has version {values['version']!r}, this package reads {VERSION}", "version")
        if values["digest"] != _digest({name: value for name, value in values.items() if name != "digest"}):
            raise ReceiptError(f"'{where}' was changed after it was written; accelerate again", "digest")
        verdicts = tuple(Verdict(**{**v, "sites": tuple(v["sites"])}) for v in values["candidates"])
        parts = {name: values[name] for name in ("model", "environment", "gates", "search", "result")}
        return cls(candidates=verdicts, **parts)

    def check(self, model: dict[str, str], environment: dict[str, str]) -> None:
        """ReceiptError, naming the first field that differs, unless the receipt is about this model and environment."""
        for part, found, recorded in (
            ("model", model, self.model),
            ("environment", environment, self.environment),
        ):
            names = differences(found, recorded)
            if names:
                name = names[0]
                raise ReceiptError(
                    f"the receipt is about another {part}: {part}.{name} is {found.get(name)!r} here and "
                    f"{recorded.get(name)!r} in the receipt; accelerate again",
                    f"{part}.{name}",
                )


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
