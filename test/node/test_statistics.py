"""Rolling percentiles against numpy's, and rates of streams that run, slow down and stop."""

from __future__ import annotations

import math
import threading
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrt_ros.node.statistics import RateMeter, RollingWindow

SECOND = 1_000_000_000
finite = st.floats(-1e6, 1e6)


@given(values=st.lists(finite, min_size=1, max_size=60), capacity=st.integers(1, 25))
def test_percentiles_are_those_of_the_newest_values(values: list[float], capacity: int) -> None:
    window = RollingWindow(capacity)
    for value in values:
        window.add(value)
    newest = values[-capacity:]
    assert len(window) == len(newest)
    result = window.percentiles()
    expected = np.percentile(newest, [50, 95, 99])
    np.testing.assert_allclose([result.p50, result.p95, result.p99], expected, rtol=1e-9, atol=1e-9)


def test_reading_percentiles_does_not_disturb_the_order_of_arrival() -> None:
    window = RollingWindow(3)
    for value in (9.0, 1.0, 5.0):
        window.add(value)
        window.percentiles()
    window.add(2.0)
    assert window.quantiles((0.0, 0.5, 1.0)) == (1.0, 2.0, 5.0)


def test_an_empty_window_has_no_percentiles() -> None:
    window = RollingWindow(4)
    window.add(1.0)
    window.clear()
    assert len(window) == 0
    assert all(math.isnan(value) for value in window.quantiles((0.5, 0.99)))


def test_memory_does_not_grow_with_the_values() -> None:
    window = RollingWindow(8)
    rings = {id(window._ring), id(window._sorted)}
    for value in range(1000):
        window.add(value)
        window.percentiles()
    assert {id(window._ring), id(window._sorted)} == rings
    assert window._ring.shape == window._sorted.shape == (8,)


def test_nan_and_an_empty_capacity_are_refused() -> None:
    with pytest.raises(ValueError, match="NaN"):
        RollingWindow(4).add(math.nan)
    with pytest.raises(ValueError, match="at least 1"):
        RollingWindow(0)


def test_a_reader_beside_a_writer_sees_only_whole_windows() -> None:
    window = RollingWindow(64)
    for _ in range(64):
        window.add(0.0)

    def write() -> None:
        for value in range(20_000):
            window.add(float(value))

    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive():
        lowest, highest = window.quantiles((0.0, 1.0))
        # The window holds consecutive numbers, or zeros and the first of them.
        assert highest - lowest < 64
    writer.join()
    assert window.quantiles((0.0, 1.0)) == (20_000 - 64, 19_999)


@pytest.mark.parametrize("hertz", [1, 5, 30, 100])
def test_a_steady_stream_has_its_rate(hertz: int) -> None:
    meter = RateMeter(horizon_s=5.0)
    for tick in range(10 * hertz + 1):
        meter.tick(tick * SECOND // hertz)
    assert meter.rate(10 * SECOND) == pytest.approx(hertz, rel=1e-6)
    assert meter.total == 10 * hertz + 1


def test_the_rate_follows_a_change_within_its_horizon() -> None:
    meter = RateMeter(horizon_s=1.0)
    times = [*range(0, 5 * SECOND, SECOND // 10), *range(5 * SECOND, 8 * SECOND + 1, SECOND // 50)]
    for time in times:
        meter.tick(time)
    assert meter.rate(8 * SECOND) == pytest.approx(50, rel=1e-6)


def test_the_rate_of_a_stream_that_stops_falls_to_zero() -> None:
    meter = RateMeter(horizon_s=2.0)
    for tick in range(101):
        meter.tick(tick * SECOND // 10)
    rates = [meter.rate(10 * SECOND + wait * SECOND // 10) for wait in range(25)]
    assert rates[0] == pytest.approx(10)
    assert all(later <= earlier + 1e-9 for earlier, later in pairwise(rates))
    assert 0 < rates[10] < 7
    assert rates[20] == rates[-1] == 0


@pytest.mark.parametrize("events", [0, 1])
def test_fewer_than_two_events_have_no_rate(events: int) -> None:
    meter = RateMeter(horizon_s=1.0)
    for _ in range(events):
        meter.tick(SECOND)
    assert meter.rate(SECOND) == 0.0


def test_more_events_than_are_kept_give_the_rate_of_those_that_are() -> None:
    meter = RateMeter(horizon_s=10.0, capacity=8)
    for tick in range(1001):
        meter.tick(tick * SECOND // 100)
    assert meter.rate(10 * SECOND) == pytest.approx(100)


@pytest.mark.parametrize(("horizon", "capacity"), [(0.0, 8), (-1.0, 8), (math.nan, 8), (1.0, 1)])
def test_a_meter_that_could_not_measure_is_refused(horizon: float, capacity: int) -> None:
    with pytest.raises(ValueError, match="expected more than 0 s and at least 2 events"):
        RateMeter(horizon, capacity)
