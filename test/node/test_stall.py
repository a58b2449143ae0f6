"""The stall policy: one action a stall."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrt_ros.node.stall import StallAction, StallPolicy


@pytest.mark.parametrize("action", [StallAction.HOLD, StallAction.STOP])
def test_the_action_comes_with_the_nth_refusal_in_a_row_and_only_once(action: StallAction) -> None:
    policy = StallPolicy(action, after=3)
    assert [policy.refused() for _ in range(6)] == [StallAction.NONE] * 2 + [action] + [StallAction.NONE] * 3
    assert policy.stalls == 1


def test_a_published_chunk_ends_the_stall_and_the_next_one_acts_again() -> None:
    policy = StallPolicy(StallAction.HOLD, after=2)
    seen = [(step(), policy.stalled) for step in (policy.refused, policy.refused, policy.published) * 2]
    assert seen == [(StallAction.NONE, False), (StallAction.HOLD, True), (None, False)] * 2
    assert policy.stalls == 2


def test_refusals_that_are_not_in_a_row_are_no_stall() -> None:
    policy = StallPolicy(StallAction.STOP, after=2)
    for _ in range(5):
        assert policy.refused() is StallAction.NONE
        policy.published()
    assert policy.stalls == 0


def test_without_an_action_a_stall_is_still_counted() -> None:
    policy = StallPolicy(StallAction.NONE, after=1)
    assert policy.refused() is StallAction.NONE
    assert policy.stalled
    assert policy.stalls == 1


def test_a_reset_starts_anew_and_keeps_the_count_of_stalls() -> None:
    policy = StallPolicy(StallAction.HOLD, after=1)
    policy.refused()
    policy.reset()
    assert not policy.stalled
    assert policy.refused() is StallAction.HOLD
    assert policy.stalls == 2


@given(events=st.lists(st.booleans()), after=st.integers(1, 5))
def test_actions_are_as_many_as_runs_of_refusals_that_are_long_enough(events: list[bool], after: int) -> None:
    policy = StallPolicy(StallAction.STOP, after)
    actions = 0
    for refused in events:
        if refused:
            actions += policy.refused() is StallAction.STOP
        else:
            policy.published()
    runs = "".join("r" if refused else " " for refused in events).split()
    assert actions == policy.stalls == sum(len(run) >= after for run in runs)


def test_a_stall_after_no_refusal_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        StallPolicy(StallAction.HOLD, after=0)


def test_the_actions_are_the_words_of_the_parameter() -> None:
    assert {action.value for action in StallAction} == {"none", "hold", "stop"}
