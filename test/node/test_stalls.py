"""What the node does when chunks are refused again and again, and when a decision breaks off."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashrt_ros.msg import Refusal
from test.node.rig import Rig, record_chunks, record_errors, record_status, wait_until
from test.node.robot import Robot, default_robot, image_message, solid

NAN_IN_THE_DARK: dict[str, Any] = {"policy.action_names": ["a", "b", "log_front"], "action_joints": ["a", "b"]}
LIMITED: dict[str, Any] = {"limits.a.upper": 0.5, "stall_after": 3}


def lit(rig: Rig) -> Robot:
    return default_robot(rig).start()


def move_beyond_the_limit(robot: Robot) -> None:
    robot.sensors["joint_states"].message.position[0] = 0.6


def test_columns_that_no_joint_takes_are_not_judged(rig: Rig) -> None:
    robot = default_robot(rig)
    robot.sensors["front"].message = image_message(solid(1, 1, 1))
    robot.start()
    chunks = record_chunks(rig)
    rig.active_policy(NAN_IN_THE_DARK)
    assert list(chunks.next()[0].joint_names) == ["a", "b"]


def test_without_a_policy_for_stalls_nothing_is_published_and_the_node_stays_active(rig: Rig) -> None:
    robot = lit(rig)
    chunks, statuses = record_chunks(rig), record_status(rig)
    node = rig.active_policy({**LIMITED, "stall_policy": "none"})
    chunks.next()
    move_beyond_the_limit(robot)
    status = statuses.wait_for(lambda m: m.stalled, "the node stalls")
    assert "joint 'a' at step 0" in status.reason
    statuses.next(2)
    count = len(chunks)
    statuses.next(3)
    assert len(chunks) == count
    assert node.state == "active"
    robot.sensors["joint_states"].message.position[0] = 0.1
    chunks.next()
    statuses.wait_for(lambda m: not m.stalled and not m.reason, "the stall is over", start=len(statuses))


def test_hold_publishes_one_chunk_that_repeats_the_measured_positions(rig: Rig) -> None:
    robot = lit(rig)
    chunks, statuses = record_chunks(rig), record_status(rig)
    rig.active_policy({**LIMITED, "stall_policy": "hold", "policy.drift": 0.01})
    chunks.next()
    move_beyond_the_limit(robot)
    held = chunks.wait_for(lambda m: np.isclose(m.data[0], 0.6), "a chunk that holds")
    positions = np.reshape(held.data, (held.horizon, 3))
    assert np.allclose(positions, [0.6, 0.2, 0.3])
    assert held.chunk_id == chunks.messages[-1].chunk_id
    statuses.wait_for(lambda m: sum(r.count for r in m.chunk_refusals) > 10, "many refusals later")
    assert chunks.messages[-1] is held  # once a stall


def test_stop_deactivates_the_node_and_says_why(rig: Rig) -> None:
    robot = lit(rig)
    chunks, statuses = record_chunks(rig), record_status(rig)
    node = rig.active_policy({**LIMITED, "stall_policy": "stop"})
    chunks.next()
    move_beyond_the_limit(robot)
    wait_until(lambda: node.state == "inactive", "the node deactivates itself")
    status = statuses.wait_for(lambda m: m.state.label == "inactive" and "refused again and again" in m.reason, "why")
    assert "joint 'a' at step 0" in status.reason
    robot.sensors["joint_states"].message.position[0] = 0.1
    assert node.transition("activate")
    assert chunks.next()


def test_a_decision_that_breaks_off_is_counted_logged_once_and_the_next_one_works(rig: Rig) -> None:
    robot = lit(rig)
    chunks, statuses, errors = record_chunks(rig), record_status(rig), record_errors(rig)
    node = rig.active_policy({"policy.views": ["front"], "policy.break_on_white": True})
    chunks.next()
    robot.sensors["front"].message = image_message(solid(255, 255, 255))
    status = statuses.wait_for(
        lambda m: {r.cause: r.count for r in m.chunk_refusals}.get(Refusal.BROKE_OFF, 0) > 3, "the fault is counted"
    )
    assert "ArithmeticError: white" in status.reason
    assert node.state == "active"
    robot.sensors["front"].message = image_message(solid(1, 1, 1))
    assert chunks.next()
    assert sum("ArithmeticError: white" in message.msg for message in errors.messages) == 1


def test_a_chunk_that_is_ready_only_after_its_last_step_is_not_published(rig: Rig) -> None:
    lit(rig)
    chunks, statuses = record_chunks(rig), record_status(rig)
    rig.active_policy({"policy.delay": 0.2, "policy.action_dt": 0.01, "warmup": 0})
    statuses.wait_for(lambda m: Refusal.EXPIRED in {r.cause for r in m.chunk_refusals}, "the chunk expired")
    assert not len(chunks)
