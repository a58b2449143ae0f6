"""Counts and times of what was decided since configure; warm-up is not part of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from .statistics import RateMeter, RollingWindow

_KEPT = 1000
_RATE_HORIZON_S = 5.0


@dataclass
class Tally:
    """The worker writes, the status reads. Every tick that was not skipped is a published chunk, a refused one, or one
    without an observation. Times are in seconds.

    `latency` is from the receipt of the newest frame to the publication of the chunk, `session_time` from the first
    byte copied into a window to the actions, `overhead` the rest of the latency.
    """

    published: int = 0
    without_observation: int = 0
    stale_replays: int = 0
    bytes_per_frame: int = 0
    refusals: dict[int, tuple[int, str]] = field(default_factory=dict)
    rate: RateMeter = field(default_factory=lambda: RateMeter(_RATE_HORIZON_S))
    latency: RollingWindow = field(default_factory=lambda: RollingWindow(_KEPT))
    session_time: RollingWindow = field(default_factory=lambda: RollingWindow(_KEPT))
    overhead: RollingWindow = field(default_factory=lambda: RollingWindow(_KEPT))

    def current_rate(self) -> float:
        """Published chunks a second over the last seconds (Hz)."""
        return self.rate.rate(time.monotonic_ns())

    def count_refusal(self, cause: int, text: str) -> None:
        """Count a chunk that was not published; `cause` as in flashrt_ros/Refusal."""
        self.refusals[cause] = (self.refusals.get(cause, (0, ""))[0] + 1, text)

    def count_published(self, steady_ns: int, latency_ns: int, session_ns: int) -> None:
        """Count a chunk that left at `steady_ns`."""
        self.published += 1
        self.rate.tick(steady_ns)
        self.latency.add(latency_ns / 1e9)
        self.session_time.add(session_ns / 1e9)
        self.overhead.add((latency_ns - session_ns) / 1e9)
