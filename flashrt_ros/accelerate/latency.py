"""The latency gate: complete calls of two forms of one model, in interleaved rounds, with an interval."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from .device import finish
from .gates import FEWEST_ROUNDS, Gates

Form = Callable[[], AbstractContextManager[object]]
"""Within its context the model is in one form."""


@dataclass(frozen=True)
class Latency:
    """A form against another.

    Attributes:
        baseline_ms, ms: median of the rounds' medians.
        speedup: median of the rounds' ratios; [low, high] is its interval.
        failure: why the gate refuses it; empty if it passes.
    """

    baseline_ms: float
    ms: float
    speedup: float
    low: float
    high: float
    failure: str = ""

    @property
    def passed(self) -> bool:
        """Whether the gate lets it through."""
        return not self.failure

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, four digits."""
        values = {name: float(f"{getattr(self, name):.4g}") for name in ("baseline_ms", "ms", "speedup")}
        return {"passed": self.passed, **values, "interval": [float(f"{v:.4g}") for v in (self.low, self.high)]}


def compare(call: Callable[[], object], baseline: Form, candidate: Form, gates: Gates, device: torch.device) -> Latency:
    """Time `call` in both forms: a turn of each in every round. A call ends when its result is there."""
    forms = (baseline, candidate)
    counts = [_calls(call, form, gates, device) for form in forms]
    rounds: list[tuple[float, float]] = []
    for index in range(gates.rounds):
        times = [0.0, 0.0]
        for side in (0, 1) if index % 2 == 0 else (1, 0):
            times[side] = median(_turn(call, forms[side], counts[side], device))
        rounds.append((times[0], times[1]))
        if _hopeless(rounds, gates):
            break
    return judged(rounds, gates)


def _hopeless(rounds: list[tuple[float, float]], gates: Gates) -> bool:
    """Whether the whole interval already lies below what is needed: more rounds would only cost time.

    Stopping early can only refuse, so it lets nothing through that all rounds would not.
    """
    high = interval(sorted(before / after for before, after in rounds), gates.confidence)[1]
    return len(rounds) >= FEWEST_ROUNDS and high < gates.speedup


def typical_ms(call: Callable[[], object], form: Form, gates: Gates, device: torch.device) -> float:
    """Milliseconds of a call in one form, for planning."""
    return median(_turn(call, form, _calls(call, form, gates, device), device))


def judged(rounds: list[tuple[float, float]], gates: Gates) -> Latency:
    """The verdict on rounds of (baseline, candidate) milliseconds."""
    ratios = sorted(before / after for before, after in rounds)
    low, high = interval(ratios, gates.confidence)
    speedup = median(ratios)
    failure = ""
    if speedup < gates.speedup:
        failure = f"{speedup:.3f} times the original's speed, {gates.speedup:g} are needed"
    elif low <= 1:
        failure = f"{speedup:.3f} times the original's speed, but the interval {low:.3f} to {high:.3f} has 1 in it"
    return Latency(median(b for b, _ in rounds), median(a for _, a in rounds), speedup, low, high, failure)


def interval(ordered: list[float], confidence: float) -> tuple[float, float]:
    """Interval of the median of sorted values from their order alone: it holds for any distribution.

    The k-th smallest and k-th largest of n values enclose the median with probability 1 - 2 P(Binomial(n, 1/2) < k)
    (e.g. David and Nagaraja, Order Statistics, section 7.1); k is the largest for which that reaches `confidence`.
    Where n is too small for any k, everything is possible: (0, infinity).
    """
    count, tail, k = len(ordered), 0.0, 0
    while k < count // 2:
        tail += math.comb(count, k) / 2**count
        if 1 - 2 * tail < confidence:
            break
        k += 1
    return (ordered[k - 1], ordered[-k]) if k else (0.0, math.inf)


def _calls(call: Callable[[], object], form: Form, gates: Gates, device: torch.device) -> int:
    """Warm a form up; how many calls fill a turn."""
    typical = median(_turn(call, form, gates.fewest_calls, device)) / 1e3
    return max(gates.fewest_calls, min(1000, int(gates.turn_s / max(typical, 1e-6))))


def _turn(call: Callable[[], object], form: Form, calls: int, device: torch.device) -> list[float]:
    with form():
        call()  # caches of the other form's turn are cold for both
        finish(device)
        return list(_timed(call, calls, device))


def _timed(call: Callable[[], object], calls: int, device: torch.device) -> Iterator[float]:
    for _ in range(calls):
        start = time.perf_counter()
        call()
        finish(device)
        yield (time.perf_counter() - start) * 1e3
