"""Percentiles and rates over the recent past, in memory that is allocated once.

Both classes may be written by one thread while another reads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np


@dataclass(frozen=True, slots=True)
class Percentiles:
    """What a status reports of a window; NaN where it is empty."""

    p50: float
    p95: float
    p99: float


class RollingWindow:
    """The newest `capacity` values, and their percentiles.

    Args:
        capacity: values kept, at least 1; older ones are overwritten.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a window of {capacity} values holds nothing; expected at least 1")
        self._ring = np.zeros(capacity)
        self._sorted = np.zeros(capacity)
        self._next = 0
        self._count = 0
        self._lock = Lock()

    def __len__(self) -> int:
        return self._count

    def add(self, value: float) -> None:
        """Remember one value; ValueError if it is NaN, which has no place in an order."""
        if math.isnan(value):
            raise ValueError("NaN cannot be ranked among other values")
        with self._lock:
            self._ring[self._next] = value
            self._next = (self._next + 1) % len(self._ring)
            self._count = min(self._count + 1, len(self._ring))

    def clear(self) -> None:
        """Forget every value."""
        with self._lock:
            self._next = self._count = 0

    def percentiles(self) -> Percentiles:
        """p50, p95 and p99, interpolated linearly between neighbours as `numpy.percentile` does."""
        return Percentiles(*self.quantiles((0.50, 0.95, 0.99)))

    def quantiles(self, fractions: Sequence[float]) -> tuple[float, ...]:
        """The value below which each fraction (0 to 1) of the window lies; NaN if it is empty."""
        with self._lock:
            live = self._sorted[: self._count]
            live[:] = self._ring[: self._count]
            live.sort()
            return tuple(_interpolate(live, fraction) for fraction in fractions)


class RateMeter:
    """How many events a second came lately.

    Args:
        horizon_s: how far back "lately" goes, seconds.
        capacity: events kept. If more come within the horizon, the rate is taken over those that are kept.
    """

    def __init__(self, horizon_s: float, capacity: int = 1024) -> None:
        if not horizon_s > 0 or capacity < 2:
            raise ValueError(f"horizon {horizon_s} s, {capacity} events; expected more than 0 s and at least 2 events")
        self._horizon_ns = round(horizon_s * 1e9)
        self._ring = np.zeros(capacity, np.int64)
        self._total = 0
        self._lock = Lock()

    @property
    def total(self) -> int:
        """Events since construction."""
        return self._total

    def tick(self, steady_ns: int) -> None:
        """Count one event at `steady_ns`, steady clock; times may not decrease."""
        with self._lock:
            self._ring[self._total % len(self._ring)] = steady_ns
            self._total += 1

    def rate(self, steady_ns: int) -> float:
        """Events a second up to `steady_ns`.

        It is the number of intervals between the events within the horizon, over the time that they took.
        When the next event is overdue, the time goes on to now, so that the rate of a stream that has stopped
        falls to 0.
        """
        with self._lock:
            kept = min(self._total, len(self._ring))
            # Ticks do not decrease, so the events within the horizon are the last ones.
            recent = int((self._ring[:kept] > steady_ns - self._horizon_ns).sum())
            if recent < 2:
                return 0.0
            newest = int(self._ring[(self._total - 1) % len(self._ring)])
            oldest = int(self._ring[(self._total - recent) % len(self._ring)])
        mean_ns = (newest - oldest) / (recent - 1)
        overdue_ns = max(0.0, steady_ns - newest - mean_ns)
        span_ns = newest - oldest + overdue_ns
        return (recent - 1) / span_ns * 1e9 if span_ns else 0.0


def _interpolate(ordered: np.ndarray, fraction: float) -> float:
    if not len(ordered):
        return math.nan
    position = fraction * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return float(ordered[below] + (ordered[above] - ordered[below]) * (position - below))
