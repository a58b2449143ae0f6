"""What the demo received, message by message. Imports no ROS."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from .photographs import Pixels


@dataclass(frozen=True)
class ReceivedChunk:
    """One ActionChunk and when it arrived. Times are nanoseconds of the system clock.

    `data` is float32[horizon, joints] in radians or metres; step i is due at `stamp + i * dt`.
    """

    arrival: int
    stamp: int
    dt: int
    oldest_observation: int
    inference_start: int
    inference_duration: int
    epoch: int
    chunk_id: int
    joint_names: tuple[str, ...]
    data: NDArray[np.float32]
    instruction: str
    fingerprint: str

    @property
    def latency(self) -> float:
        """Seconds from when the node began to fill the windows until the chunk arrived here."""
        return (self.arrival - self.inference_start) * 1e-9

    @property
    def age(self) -> float:
        """Seconds from the stamp of the oldest observation used until the chunk arrived here."""
        return (self.arrival - self.oldest_observation) * 1e-9


@dataclass(frozen=True)
class StreamCounts:
    """One input stream, as a status tells it."""

    name: str
    rate: float
    header_age: float
    received: int
    used: int


@dataclass(frozen=True)
class Refused:
    """How often a stream's messages, or chunks, were refused for one numbered cause, and the last time's words."""

    what: str
    cause: int
    count: int
    last_reason: str


@dataclass(frozen=True)
class Status:
    """The parts of one EngineStatus that the demo tells. Seconds, bytes, Hz."""

    state: str
    reason: str
    policy: str
    checkpoint: str
    precision: str
    device: str
    fingerprint: str
    instruction: str
    chunks_published: int
    ticks_skipped: int
    stale_replays: int
    session_p50: float
    bytes_copied_per_frame: int
    replays: tuple[tuple[str, str, int], ...]  # stage, update rate, replays
    streams: tuple[StreamCounts, ...]
    refusals: tuple[Refused, ...]


@dataclass
class Recording:
    """Everything that arrived since `start`, nanoseconds of the system clock; 0: since the beginning.

    `first_status` is the one at `start`; the node counts since configure, the demo since then.
    """

    start: int = 0
    chunks: list[ReceivedChunk] = field(default_factory=list)
    positions: list[tuple[int, tuple[float, ...]]] = field(default_factory=list)  # stamp (ns), by `joint_names`
    joint_names: tuple[str, ...] = ()
    instructions: list[tuple[int, str]] = field(default_factory=list)  # time of publication (ns), text
    frames: dict[str, Pixels] = field(default_factory=dict)  # view → one RGB frame, as received
    first_status: Status | None = None
    status: Status | None = None

    def begin(self, now: int) -> None:
        """Forget the chunks and positions that came so far; the clock starts `now` (ns)."""
        self.start = now
        self.first_status = self.status
        self.chunks.clear()
        self.positions.clear()

    def recent_rate(self, now: int, window: float = 2.0) -> float:
        """Chunks a second over the last `window` seconds before `now` (ns)."""
        since = max(now - round(window * 1e9), self.start)
        recent = sum(1 for chunk in reversed(self.chunks[-200:]) if chunk.arrival > since)
        return recent / max((now - since) * 1e-9, 1e-3)

    @property
    def refusals(self) -> tuple[Refused, ...]:
        """What the node refused since `start`."""
        before = {(r.what, r.cause): r.count for r in self.first_status.refusals} if self.first_status else {}
        after = self.status.refusals if self.status else ()
        counted = (replace(r, count=r.count - before.get((r.what, r.cause), 0)) for r in after)
        return tuple(refused for refused in counted if refused.count)

    def epochs(self) -> Counter[int]:
        """Chunks by epoch."""
        return Counter(chunk.epoch for chunk in self.chunks)


def percentiles_ms(seconds: Sequence[float], points: Sequence[int]) -> dict[str, float]:
    """`{"p50": …}` in milliseconds with two decimals; the values are interpolated."""
    values = np.percentile(np.asarray(seconds, np.float64), points) * 1e3
    return {f"p{point}": round(float(value), 2) for point, value in zip(points, values, strict=True)}
