"""What `accelerate` returns: the verdicts, the counters of the guards, and the way back."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from types import TracebackType
from typing import Any

from .calls import CompleteCall
from .candidates import Live, release
from .device import finish
from .guards import Stopwatch, Tally
from .receipt import KEPT, Receipt

_CALLS = 15
MARK = "_flashrt_ros_accelerated"


class Report:
    """An accelerated model: in force until `detach`, or until a `with` block is left.

    Attributes:
        model: the user's own object.
        receipt: everything that was found out.
    """

    def __init__(self, call: CompleteCall, receipt: Receipt, live: Live) -> None:
        self.model, self.receipt = call.model, receipt
        self._call = call
        self._live: Live | None = live
        self._tallies = live.tallies
        self._device = live.device
        for tally in self._tallies:
            tally.misses.clear()  # of the search
        live.enable()
        if live.candidates:
            self.model.__dict__[MARK] = self

    @property
    def kept(self) -> tuple[str, ...]:
        """Names of the candidates that are in the model; none if nothing passed, and the model is then untouched."""
        return self.receipt.kept

    @property
    def refused(self) -> dict[str, str]:
        """Name to reason of every candidate that is not."""
        return self.receipt.refused

    @property
    def speedup(self) -> float:
        """Of the complete call against the original; 1 if nothing was kept."""
        latency = self.receipt.result["latency"]
        return float(latency["speedup"]) if latency else 1.0

    @property
    def active(self) -> bool:
        """Whether the model is still accelerated."""
        return self._live is not None

    @property
    def tallies(self) -> tuple[Tally, ...]:
        """By site: calls that ran the original, by reason, and why the site gave up if it did."""
        return tuple(self._tallies)

    @property
    def guard_ms(self) -> float:
        """Milliseconds that the guards' decisions take in a complete call, measured now; 0 after `detach`.

        The median of some calls, each finished before the next, after one that does not count: as calls are timed.
        """
        if self._live is None:
            return 0.0
        guards = [guarded.guard for guarded in self._live.guarded]
        watches = [Stopwatch(guard) for guard in guards]
        for guarded, watch in zip(self._live.guarded, watches, strict=True):
            guarded.guard = watch
        try:
            seconds = [self._watched_call(watches) for _ in range(1 + _CALLS)][1:]
        finally:
            for guarded, guard in zip(self._live.guarded, guards, strict=True):
                guarded.guard = guard
        return median(seconds) * 1e3

    def _watched_call(self, watches: Sequence[Stopwatch]) -> float:
        """Seconds of all guards in one call."""
        before = sum(watch.seconds for watch in watches)
        self._call.run(0)
        finish(self._device)
        return sum(watch.seconds for watch in watches) - before

    def detach(self) -> None:
        """Give the model back bit for bit as it was; nothing if that has happened."""
        if self._live is not None:
            self._live.disable()
            self.model.__dict__.pop(MARK, None)
            self._live = None
            release(self._device)

    def __enter__(self) -> Report:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.detach()

    def rows(self) -> list[tuple[str, ...]]:
        """(candidate, sites, worst cosine, dimension error, speed-up, verdict, reason) of each candidate, as text."""
        return [
            (
                v.name,
                str(len(v.sites)),
                _figure(v.parity, "cosine_worst", ".6f"),
                _figure(v.parity, "dimension_error", ".2g"),
                _figure(v.latency, "speedup", ".3f") + (f" ({v.against})" if v.latency and v.verdict != KEPT else ""),
                v.verdict,
                v.reason,
            )
            for v in self.receipt.candidates
        ]


def _figure(values: Any, name: str, form: str) -> str:
    value = values.get(name) if values else None
    return "-" if value is None else format(value, form)
