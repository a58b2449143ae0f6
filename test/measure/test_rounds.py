"""The timing protocol: who is called when, and what counts; by a clock that moves only where something sleeps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from flashrt_ros.measure import rounds
from flashrt_ros.measure.rounds import Candidate, Pace, Schedule, measure, measure_at_rate

CPU = torch.device("cpu")
QUICK = Schedule(rounds=3, calls=2, turn_s=1.0, fewest=2, warm_up_s=0.0, warm_up_calls=2, discarded=1)


class Clock:
    """What `rounds` uses of the module `time`, whatever else the machine does meanwhile."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(rounds, "time", clock)
    return clock


def test_rounds_are_interleaved_and_rotate() -> None:
    order: list[str] = []
    names = ("a", "b")
    candidates = [Candidate(name, lambda name=name: order.append(name)) for name in names]
    measure(candidates, QUICK, CPU)
    a, b = ["a"] * 3, ["b"] * 3  # two timed calls behind a discarded one
    assert order == ["a", "a", "b", "b", *a, *b, *b, *a, *a, *b]


def test_only_the_timed_calls_count(clock: Clock) -> None:
    calls = 0

    def slow_at_first() -> None:
        nonlocal calls
        calls += 1
        if calls <= 2 or (calls - 3) % 3 == 0:  # warm-up, and the discarded call of each turn
            clock.sleep(0.02)

    samples = measure([Candidate("x", slow_at_first)], QUICK, CPU)["x"]
    assert samples.total == [0] * 6


def test_a_slow_candidate_gets_a_shorter_turn_but_not_none(clock: Clock) -> None:
    schedule = Schedule(rounds=2, calls=50, turn_s=0.01, fewest=3, warm_up_s=0.0, warm_up_calls=1, discarded=0)
    samples = measure([Candidate("slow", lambda: clock.sleep(0.01))], schedule, CPU)["slow"]
    assert samples.total == pytest.approx([10] * 6)


def test_warm_up_lasts_as_long_as_it_should(clock: Clock) -> None:
    schedule = Schedule(rounds=1, calls=1, fewest=1, warm_up_s=1 / 16, warm_up_calls=1, discarded=0)
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        clock.sleep(1 / 128)

    measure([Candidate("x", call)], schedule, CPU)
    assert calls == 8 + 1


def test_laps_add_up_to_the_whole(clock: Clock) -> None:
    def call(lap: Callable[[], None]) -> None:
        clock.sleep(0.002)
        lap()
        clock.sleep(0.004)
        lap()

    samples = measure([Candidate("x", call, laps=("first", "second"))], QUICK, CPU)["x"]
    assert samples.laps == {"first": pytest.approx([2] * 6), "second": pytest.approx([4] * 6)}
    assert samples.total == pytest.approx([6] * 6)


def test_a_missing_lap_is_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        measure([Candidate("x", lambda lap: lap(), laps=("first", "second"))], QUICK, CPU)


def test_the_rule_is_told_in_words() -> None:
    text = Schedule(rounds=7, calls=30).describe()
    assert "7 interleaved rounds" in text
    assert "30 calls" in text


def test_at_a_rate_candidates_take_turns_and_begin_when_they_are_due(clock: Clock) -> None:
    begun: list[tuple[str, float]] = []

    def note(name: str) -> None:
        begun.append((name, clock.now))
        clock.sleep(0.003)

    candidates = [Candidate(name, lambda name=name: note(name)) for name in ("a", "b")]
    samples, late = measure_at_rate(candidates, Pace(hz=200, calls=3, discarded=1), CPU)
    assert [name for name, _ in begun] == ["a", "b"] * 4
    assert [at for _, at in begun] == pytest.approx([n / 200 for n in range(1, 9)])
    assert {name: samples[name].total for name in samples} == {"a": pytest.approx([3] * 3), "b": pytest.approx([3] * 3)}
    assert late == 0


def test_what_takes_longer_than_the_rate_allows_is_counted_as_late_and_not_made_up_for(clock: Clock) -> None:
    begun: list[float] = []

    def slow() -> None:
        begun.append(clock.now)
        if len(begun) == 1:
            clock.sleep(0.1)

    samples, late = measure_at_rate([Candidate("x", slow)], Pace(hz=50, calls=4, discarded=0), CPU)
    assert late == 1
    assert begun == pytest.approx([0.02, 0.12, 0.14, 0.16])
    assert samples["x"].total == pytest.approx([100, 0, 0, 0])
