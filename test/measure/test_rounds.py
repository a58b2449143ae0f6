"""The timing protocol: who is called when, and what counts."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from flashrt_ros.measure.rounds import Candidate, Pace, Schedule, measure, measure_at_rate

CPU = torch.device("cpu")
QUICK = Schedule(rounds=3, calls=2, turn_s=1.0, fewest=2, warm_up_s=0.0, warm_up_calls=2, discarded=1)


def test_rounds_are_interleaved_and_rotate() -> None:
    order: list[str] = []
    names = ("a", "b")
    candidates = [Candidate(name, lambda name=name: order.append(name)) for name in names]
    measure(candidates, QUICK, CPU)
    a, b = ["a"] * 3, ["b"] * 3  # two timed calls behind a discarded one
    assert order == ["a", "a", "b", "b", *a, *b, *b, *a, *a, *b]


def test_only_the_timed_calls_count() -> None:
    calls = 0

    def slow_at_first() -> None:
        nonlocal calls
        calls += 1
        if calls <= 2 or (calls - 3) % 3 == 0:  # warm-up, and the discarded call of each turn
            time.sleep(0.02)

    samples = measure([Candidate("x", slow_at_first)], QUICK, CPU)["x"]
    assert len(samples.total) == 6
    assert max(samples.total) < 20


def test_a_slow_candidate_gets_a_shorter_turn_but_not_none() -> None:
    schedule = Schedule(rounds=2, calls=50, turn_s=0.01, fewest=3, warm_up_s=0.0, warm_up_calls=1, discarded=0)
    samples = measure([Candidate("slow", lambda: time.sleep(0.01))], schedule, CPU)["slow"]
    assert len(samples.total) == 6
    assert min(samples.total) >= 10


def test_warm_up_lasts_as_long_as_it_should() -> None:
    schedule = Schedule(rounds=1, calls=1, fewest=1, warm_up_s=0.05, warm_up_calls=1, discarded=0)
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        time.sleep(0.005)

    measure([Candidate("x", call)], schedule, CPU)
    assert calls >= 6


def test_laps_add_up_to_the_whole() -> None:
    def call(lap: Callable[[], None]) -> None:
        time.sleep(0.002)
        lap()
        time.sleep(0.004)
        lap()

    samples = measure([Candidate("x", call, laps=("first", "second"))], QUICK, CPU)["x"]
    for first, second, total in zip(samples.laps["first"], samples.laps["second"], samples.total, strict=True):
        assert first + second == pytest.approx(total)
        assert first >= 2
        assert second >= 4


def test_a_missing_lap_is_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        measure([Candidate("x", lambda lap: lap(), laps=("first", "second"))], QUICK, CPU)


def test_the_rule_is_told_in_words() -> None:
    text = Schedule(rounds=7, calls=30).describe()
    assert "7 interleaved rounds" in text
    assert "30 calls" in text


def test_at_a_rate_candidates_take_turns_and_begin_when_they_are_due() -> None:
    order: list[str] = []
    begun: list[float] = []

    def note(name: str) -> None:
        order.append(name)
        begun.append(time.perf_counter())

    candidates = [Candidate(name, lambda name=name: note(name)) for name in ("a", "b")]
    samples, _ = measure_at_rate(candidates, Pace(hz=200, calls=3, discarded=1), CPU)
    assert order == ["a", "b"] * 4
    assert [len(samples[name].total) for name in ("a", "b")] == [3, 3]
    assert begun[-1] - begun[0] >= 7 / 200 - 1e-3  # at their time, not one behind the other


def test_what_takes_longer_than_the_rate_allows_is_counted_as_late_and_not_made_up_for() -> None:
    begun: list[float] = []

    def slow() -> None:
        begun.append(time.perf_counter())
        if len(begun) == 1:
            time.sleep(0.1)

    samples, late = measure_at_rate([Candidate("x", slow)], Pace(hz=50, calls=4, discarded=0), CPU)
    assert 1 <= late < 4  # one, and more only if the machine is busy in between
    assert len(samples["x"].total) == 4
    assert begun[-1] - begun[1] >= 2 / 50 - 1e-3  # no burst behind it
