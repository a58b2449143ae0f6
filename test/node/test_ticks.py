"""Ticks that a late timer left out are counted, each once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrt_ros.node.ticks import TickCounter

PERIOD = 100


@pytest.mark.parametrize(
    ("times", "missed"),
    [
        ([100, 200, 300], [0, 0, 0]),
        ([99, 199, 299], [0, 0, 0]),  # the clock was read a little after the timer's own start
        ([199, 200, 300], [0, 0, 0]),  # late, but before the next was due
        ([100, 350, 400], [0, 1, 0]),
        ([450, 500, 900], [3, 0, 3]),
    ],
)
def test_a_tick_is_missed_when_its_successor_was_due_before_the_timer_fired(
    times: list[int], missed: list[int]
) -> None:
    counter = TickCounter(PERIOD)
    counter.restart(0)
    assert [counter.missed(time) for time in times] == missed


@given(st.lists(st.integers(0, 10 * PERIOD), min_size=1, max_size=50))
def test_fired_and_missed_ticks_together_are_those_that_were_due(delays: list[int]) -> None:
    counter, now, fired, missed, due = TickCounter(PERIOD), 0, 0, 0, PERIOD
    counter.restart(0)
    for delay in delays:  # the timer fires some time after its next due moment, as a steady timer does
        now = max(now, due) + delay
        due = (now // PERIOD + 1) * PERIOD
        missed += counter.missed(now)
        fired += 1
    assert fired + missed == now // PERIOD
