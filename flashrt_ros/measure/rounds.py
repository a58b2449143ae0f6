"""Timing several candidates fairly, in one process: in interleaved rounds, or at the rate of a robot."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch


@dataclass(frozen=True)
class Candidate:
    """Something whose time is measured.

    Attributes:
        call: one decision. It may return before the device has finished.
        on_host: time it with the host's clock; `call` must then return only when the result is there. Otherwise device
            events around the call are used where there is a GPU.
        laps: names of the parts of a call; `call` then takes a function and calls it at the end of each part.
        calls: timed calls of a turn, at most, where that is less than the schedule's.
    """

    name: str
    call: Callable[..., object]
    on_host: bool = False
    laps: tuple[str, ...] = ()
    calls: int | None = None


@dataclass(frozen=True)
class Schedule:
    """How often what is called.

    Attributes:
        rounds: how often every candidate has its turn; the order rotates by one each round.
        calls: timed calls of a turn, at most.
        turn_s: length of a turn that a slow candidate is cut to (but at least `fewest` calls).
        warm_up_s, warm_up_calls: before the first round, each candidate runs at least so long and so often.
        discarded: calls at the beginning of each turn that don't count.
    """

    rounds: int = 10
    calls: int = 100
    turn_s: float = 1.0
    fewest: int = 3
    warm_up_s: float = 1.0
    warm_up_calls: int = 5
    discarded: int = 2

    def describe(self) -> str:
        """The rule in words, for the result."""
        return (
            f"Warm-up: each candidate at least {self.warm_up_calls} calls and {self.warm_up_s:g} s. Then {self.rounds} "
            f"interleaved rounds, order rotated; a turn is {self.calls} calls or {self.turn_s:g} s (at least "
            f"{self.fewest} calls), of which the first {self.discarded} are extra and discarded. Every call is "
            "finished before the next begins."
        )


@dataclass
class Samples:
    """Milliseconds of every timed call of one candidate, and of its parts."""

    total: list[float] = field(default_factory=list)
    laps: dict[str, list[float]] = field(default_factory=dict)


def measure(candidates: Sequence[Candidate], schedule: Schedule, device: torch.device) -> dict[str, Samples]:
    """Run the schedule; samples by the candidates' names."""
    samples = {candidate.name: Samples(laps={lap: [] for lap in candidate.laps}) for candidate in candidates}
    turns = {candidate.name: _warm_up(candidate, schedule, device) for candidate in candidates}
    for index in range(schedule.rounds):
        start = index % len(candidates)
        for candidate in (*candidates[start:], *candidates[:start]):
            for number in range(turns[candidate.name] + schedule.discarded):
                times = _timed(candidate, device)
                if number >= schedule.discarded:
                    _record(samples[candidate.name], candidate, times)
    return samples


@dataclass(frozen=True)
class Pace:
    """Calls that begin at a fixed rate, with the device idle in between, as a robot makes them.

    Attributes:
        hz: calls a second, of all candidates together, which take turns.
        calls: timed calls of each candidate.
        discarded: calls of each at the beginning that don't count.
    """

    hz: float
    calls: int = 1000
    discarded: int = 20

    def describe(self) -> str:
        """The rule in words, for the result."""
        return (
            f"{self.hz:g} calls a second, of each candidate in turn: {self.calls} timed ones behind {self.discarded} "
            "that are discarded. A call that is due before the one in front of it has ended begins late, right then."
        )


def measure_at_rate(
    candidates: Sequence[Candidate], pace: Pace, device: torch.device
) -> tuple[dict[str, Samples], int]:
    """Samples by the candidates' names, and how many calls were late."""
    samples = {candidate.name: Samples(laps={lap: [] for lap in candidate.laps}) for candidate in candidates}
    due, late = time.perf_counter(), 0
    for number in range(pace.discarded + pace.calls):
        for candidate in candidates:
            due += 1 / pace.hz
            ahead = due - time.perf_counter()
            if ahead > 0:
                time.sleep(ahead)
            elif number >= pace.discarded:
                late += 1
            due = max(due, time.perf_counter())
            times = _timed(candidate, device)
            if number >= pace.discarded:
                _record(samples[candidate.name], candidate, times)
    return samples, late


def _warm_up(candidate: Candidate, schedule: Schedule, device: torch.device) -> int:
    """Warm up; how many calls a turn of this candidate has."""
    start = time.perf_counter()
    times: list[float] = []
    while len(times) < schedule.warm_up_calls or time.perf_counter() - start < schedule.warm_up_s:
        times.append(sum(_timed(candidate, device)))
    typical = sorted(times)[len(times) // 2] / 1e3
    most = min(schedule.calls, candidate.calls or schedule.calls)
    return max(schedule.fewest, min(most, int(schedule.turn_s / max(typical, 1e-9))))


def _record(samples: Samples, candidate: Candidate, times: list[float]) -> None:
    samples.total.append(sum(times))
    if candidate.laps:
        for lap, value in zip(candidate.laps, times, strict=True):
            samples.laps[lap].append(value)


def _timed(candidate: Candidate, device: torch.device) -> list[float]:
    """Milliseconds of each part of one call; one part if the candidate has no laps."""
    on_device = device.type == "cuda" and not candidate.on_host
    return _device_times(candidate) if on_device else _host_times(candidate)


def _device_times(candidate: Candidate) -> list[float]:
    events: list[torch.cuda.Event] = []

    def mark() -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        events.append(event)

    mark()
    if candidate.laps:
        candidate.call(mark)
    else:
        candidate.call()
        mark()
    events[-1].synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(events)]


def _host_times(candidate: Candidate) -> list[float]:
    marks = [time.perf_counter()]
    if candidate.laps:
        candidate.call(lambda: marks.append(time.perf_counter()))
    else:
        candidate.call()
        marks.append(time.perf_counter())
    return [(b - a) * 1e3 for a, b in pairwise(marks)]
