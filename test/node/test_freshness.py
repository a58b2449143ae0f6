"""Freshness of streams: each way in which an observation can be unfit, and that it is counted under its own
reason."""

from __future__ import annotations

import pytest

from flashrt_ros.node.freshness import (
    Arrival,
    FreshnessGate,
    FreshnessLimits,
    Reason,
    Refusal,
    StreamFreshness,
)

MS = 1_000_000
SECOND = 1000 * MS
NOW = 1_700_000_000 * SECOND
STEADY = 5_000 * SECOND
LIMITS = FreshnessLimits.from_seconds(max_age=0.2, future_tolerance=0.05, max_skew=0.05)


def arrival(age_ms: float = 10, received_ms: float = 5) -> Arrival:
    """A message whose header is `age_ms` old and that came `received_ms` ago."""
    return Arrival(NOW - round(age_ms * MS), STEADY - round(received_ms * MS))


def stream() -> StreamFreshness:
    return StreamFreshness("camera 'top' (/top/image_raw)", LIMITS)


def refused(refusal: Refusal | None) -> Refusal:
    assert refusal is not None
    return refusal


def test_a_fresh_message_is_accepted_and_counts_nothing() -> None:
    rule = stream()
    assert rule.check(arrival(), NOW, STEADY, 1) is None
    assert not rule.refusals


@pytest.mark.parametrize(
    ("message", "reason", "words"),
    [
        (Arrival(0, STEADY), Reason.ZERO_STAMP, "no stamp (0)"),
        (arrival(age_ms=3_600_000), Reason.HEADER_TOO_OLD, "its stamp is 3600.000 s old, limit 0.200 s"),
        (arrival(age_ms=201), Reason.HEADER_TOO_OLD, "its stamp is 0.201 s old, limit 0.200 s"),
        (
            arrival(age_ms=-10_000),
            Reason.FROM_THE_FUTURE,
            "its stamp is 10.000 s in the future, tolerance 0.050 s",
        ),
        (
            arrival(age_ms=-51),
            Reason.FROM_THE_FUTURE,
            "its stamp is 0.051 s in the future, tolerance 0.050 s",
        ),
        (
            arrival(received_ms=201),
            Reason.RECEIVED_TOO_LONG_AGO,
            "the last message came 0.201 s ago, limit 0.200 s",
        ),
    ],
)
def test_an_unfit_stamp_is_refused_with_stream_value_and_limit_and_is_counted(
    message: Arrival, reason: Reason, words: str
) -> None:
    rule = stream()
    refusal = refused(rule.check(message, NOW, STEADY, 1))
    assert refusal.reason is reason
    assert refusal.stream == "camera 'top' (/top/image_raw)"
    assert refusal.text.startswith(refusal.stream)
    assert words in refusal.text
    assert rule.refusals == {reason: 1}


@pytest.mark.parametrize("message", [arrival(age_ms=200), arrival(age_ms=-50), arrival(received_ms=200)])
def test_an_age_on_the_limit_is_accepted(message: Arrival) -> None:
    assert stream().check(message, NOW, STEADY, 1) is None


def test_no_publisher_and_no_message_yet_are_different_reasons() -> None:
    rule = stream()
    nobody, silent = refused(rule.check(None, NOW, STEADY, 0)), refused(rule.check(None, NOW, STEADY, 2))
    assert (nobody.reason, silent.reason) == (Reason.NO_PUBLISHER, Reason.NO_MESSAGE)
    assert "nobody publishes it" in nobody.text
    assert "no message yet; its 2 publishers" in silent.text
    assert rule.refusals == {Reason.NO_PUBLISHER: 1, Reason.NO_MESSAGE: 1}


def test_a_stamp_that_goes_back_is_refused_until_it_catches_up() -> None:
    rule = stream()
    assert rule.check(arrival(age_ms=20), NOW, STEADY, 1) is None
    refusal = refused(rule.check(arrival(age_ms=21), NOW, STEADY, 1))
    assert refusal.reason is Reason.BACKWARDS
    assert "went back by 0.001 s, limit 0 s" in refusal.text
    assert rule.check(arrival(age_ms=19), NOW, STEADY, 1) is None


def test_a_refused_stamp_does_not_become_the_one_to_beat() -> None:
    rule = stream()
    assert rule.check(arrival(age_ms=-10_000), NOW, STEADY, 1) is not None
    assert rule.check(arrival(age_ms=10), NOW, STEADY, 1) is None


def test_the_same_message_may_be_used_for_two_decisions() -> None:
    rule = stream()
    for _ in range(2):
        assert rule.check(arrival(), NOW, STEADY, 1) is None


def test_after_a_reset_an_older_stamp_is_accepted_and_the_counters_go_on() -> None:
    rule = stream()
    rule.check(arrival(age_ms=20), NOW, STEADY, 1)
    rule.check(arrival(age_ms=30), NOW, STEADY, 1)
    rule.reset()
    assert rule.check(arrival(age_ms=40), NOW, STEADY, 1) is None
    assert rule.refusals == {Reason.BACKWARDS: 1}


def test_a_clock_that_has_not_started_makes_every_stamp_come_from_the_future() -> None:
    refusal = refused(stream().check(arrival(), 0, STEADY, 1))
    assert refusal.reason is Reason.FROM_THE_FUTURE
    assert "use_sim_time" in refusal.text


def gate() -> FreshnessGate:
    streams = {"top": "camera 'top'", "wrist": "camera 'wrist'", "joints": "joint states"}
    return FreshnessGate(streams, ("top", "wrist"), LIMITS)


PRESENT = {"top": 1, "wrist": 1, "joints": 1}


def test_a_gate_opens_when_every_stream_is_fresh() -> None:
    messages = {"top": arrival(10), "wrist": arrival(60), "joints": arrival(199)}
    assert gate().check(messages, NOW, STEADY, PRESENT) == ()


def test_a_gate_names_every_stream_that_is_unfit() -> None:
    rules = gate()
    refusals = rules.check({"top": arrival(500), "wrist": None}, NOW, STEADY, {"wrist": 1})
    found = {refusal.stream: refusal.reason for refusal in refusals}
    assert found == {
        "camera 'top'": Reason.HEADER_TOO_OLD,
        "camera 'wrist'": Reason.NO_MESSAGE,
        "joint states": Reason.NO_PUBLISHER,
    }
    assert rules.refusals["top"] == {Reason.HEADER_TOO_OLD: 1}


def test_cameras_too_far_apart_are_refused_with_both_names_and_the_limit() -> None:
    rules = gate()
    messages = {"top": arrival(150), "wrist": arrival(-49), "joints": arrival()}
    (refusal,) = rules.check(messages, NOW, STEADY, PRESENT)
    assert refusal.reason is Reason.SKEW
    assert "camera 'top' and camera 'wrist': taken 0.199 s apart, limit 0.050 s" in refusal.text
    assert rules.skew_refusals == 1


def test_two_cameras_200_ms_apart_are_refused_though_each_is_fresh() -> None:
    limits = FreshnessLimits.from_seconds(max_age=0.5, future_tolerance=0.05, max_skew=0.05)
    rules = FreshnessGate({"top": "top", "wrist": "wrist"}, ("top", "wrist"), limits)
    (refusal,) = rules.check({"top": arrival(210), "wrist": arrival(10)}, NOW, STEADY, PRESENT)
    assert "0.200 s apart" in refusal.text


def test_a_skew_on_the_limit_is_accepted_and_joint_states_have_none() -> None:
    messages = {"top": arrival(60), "wrist": arrival(10), "joints": arrival(180)}
    assert gate().check(messages, NOW, STEADY, PRESENT) == ()


def test_a_reset_gate_forgets_the_stamps_of_all_streams() -> None:
    rules = gate()
    messages = {name: arrival(10) for name in PRESENT}
    older = {name: arrival(20) for name in PRESENT}
    assert rules.check(messages, NOW, STEADY, PRESENT) == ()
    assert {refusal.reason for refusal in rules.check(older, NOW, STEADY, PRESENT)} == {Reason.BACKWARDS}
    rules.reset()
    assert rules.check(older, NOW, STEADY, PRESENT) == ()


def test_a_camera_that_is_no_stream_is_refused_at_construction() -> None:
    with pytest.raises(ValueError, match=r"cameras \['left'\] are not among the streams \['top'\]"):
        FreshnessGate({"top": "top"}, ("left",), LIMITS)


@pytest.mark.parametrize(
    ("ages", "name"),
    [((0, 0, 1), "max_age_ns"), ((1, -1, 1), "future_tolerance_ns"), ((1, 0, -1), "max_skew_ns")],
)
def test_limits_that_make_no_sense_are_refused(ages: tuple[float, float, float], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        FreshnessLimits.from_seconds(*ages)
