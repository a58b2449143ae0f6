"""The rows of "Inputs that have broken other people's nodes" about the lifecycle, and its rules."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState, GetAvailableTransitions, GetState
from rcl_interfaces.srv import GetParameters

from flashrt_ros.msg import CapsuleResult, EngineStatus
from flashrt_ros.node.policy_node import PolicyNode
from flashrt_ros.srv import DropCapsule, Fork, ListCapsules, Restore, Snapshot
from test.node.latch import LATCH
from test.node.rig import DEADLINE, PROBE, Recorder, Rig, record_chunks, record_errors, record_status, wait_until
from test.node.robot import default_robot

SERVICES = (
    (Snapshot, "snapshot"),
    (Restore, "restore"),
    (Fork, "fork"),
    (ListCapsules, "policy/list_capsules"),
    (DropCapsule, "policy/drop_capsule"),
)


def change(rig: Rig, number: int = 0, label: str = "") -> bool:
    request = ChangeState.Request(transition=Transition(id=number, label=label))
    return bool(rig.call(ChangeState, "policy/change_state", request, retry=False).success)


def state(rig: Rig) -> str:
    return str(rig.call(GetState, "policy/get_state", GetState.Request()).current_state.label)


def test_activate_from_unconfigured_is_refused_and_the_node_lives(rig: Rig) -> None:
    rig.policy(PROBE)
    assert not change(rig, Transition.TRANSITION_ACTIVATE)
    assert not change(rig, label="activate")
    assert not change(rig, label="no such transition")
    assert not change(rig, number=12345)
    assert state(rig) == "unconfigured"
    assert change(rig, Transition.TRANSITION_CONFIGURE)
    assert change(rig, label="activate")
    assert state(rig) == "active"


def test_configure_fails_with_one_line_and_then_succeeds_any_number_of_times(rig: Rig, tmp_path: Path) -> None:
    errors = record_errors(rig)
    checkpoint = tmp_path / "weights"
    node = rig.policy({**PROBE, "policy.checkpoint": str(checkpoint)})
    default_robot(rig).start()
    chunks = record_chunks(rig)
    for failures in range(1, 4):
        checkpoint.unlink(missing_ok=True)
        assert not node.transition("configure")
        wait_until(lambda expected=failures: len(errors) == expected, "one line of log")  # type: ignore[misc]
        text = errors.messages[-1].msg
        assert text == f"configure failed: checkpoint '{checkpoint}' cannot be read (No such file or directory)"
        assert node.state == "unconfigured"
        checkpoint.touch()
        assert node.transition("configure")
        assert node.transition("activate")
        assert chunks.next()
        assert node.transition("deactivate")
        assert node.transition("cleanup")


def test_a_fault_is_logged_with_its_traceback_and_the_node_is_unconfigured_again(rig: Rig) -> None:
    errors = record_errors(rig)
    node = rig.policy({**PROBE, "policy.broken": True})
    assert not node.transition("configure")
    log = errors.wait_for(lambda m: "a fault of the node" in m.msg, "the fault is logged").msg
    assert "Traceback" in log
    assert "ZeroDivisionError: a defect of the policy" in log
    assert node.state == "unconfigured"
    node.set_parameters([rig.parameter("policy.broken", False)])
    assert node.transition("configure")


def test_nothing_of_the_node_is_left_in_the_graph_after_cleanup(rig: Rig) -> None:
    node = rig.policy(PROBE)
    topics = ("/front/image_raw", "/wrist/image_raw", "/joint_states", "/instruction")
    assert node.transition("configure")
    assert all(node.count_subscribers(topic) for topic in topics)
    assert node.count_publishers("/action_chunk")
    assert node.transition("cleanup")
    assert not any(node.count_subscribers(topic) for topic in topics)
    assert not node.count_publishers("/action_chunk")
    assert not node.count_publishers("/policy/status")
    threads = {thread.name for thread in threading.enumerate()}
    assert "session" not in threads


def test_construction_declares_and_nothing_else(rig: Rig) -> None:
    node = rig.policy({**PROBE, "policy.checkpoint": "/no/such/file"})
    assert node.state == "unconfigured"
    assert node.has_parameter("rate_hz")
    assert not node.count_subscribers("/instruction")
    assert "session" not in {thread.name for thread in threading.enumerate()}


def _received(status: EngineStatus) -> tuple[int, ...]:
    return tuple(stream.received for stream in status.streams)


def test_observations_from_before_activation_are_not_used(rig: Rig) -> None:
    robot = default_robot(rig).start()
    chunks, statuses = record_chunks(rig), record_status(rig)
    node = rig.policy({**PROBE, "max_age": 60.0})
    assert node.transition("configure")
    statuses.wait_for(lambda m: all(s.received for s in m.streams[:3]), "everything arrived while inactive")
    robot.stop()
    wait_until(lambda: len({_received(m) for m in statuses.next(5)}) == 1, "what was under way has arrived too")
    assert node.transition("activate")
    status = statuses.wait_for(lambda m: "no message yet" in m.reason, "the node waits for new messages")
    assert status.state.label == "active"
    statuses.next(3)
    assert not len(chunks)


def test_each_activation_is_a_new_epoch_and_chunk_ids_go_on(rig: Rig) -> None:
    default_robot(rig).start()
    chunks = record_chunks(rig)
    node = rig.active_policy()
    first = chunks.next(2)[-1]
    assert node.transition("deactivate")
    wait_until(lambda: rig.quiet(chunks), "the last chunk has arrived")
    last = chunks.messages[-1]
    assert node.transition("activate")
    second = chunks.next()[0]
    assert second.epoch > first.epoch
    assert second.chunk_id == last.chunk_id + 1
    ids = [chunk.chunk_id for chunk in chunks.messages]
    assert ids == sorted(set(ids))


def test_deactivate_returns_only_after_the_replay_in_flight_and_its_chunk_is_not_published(rig: Rig) -> None:
    default_robot(rig).start()
    chunks = record_chunks(rig)
    node = rig.active_policy()
    chunks.next()
    LATCH.close()
    wait_until(LATCH.entered.is_set, "a replay is under way")
    count = len(chunks)
    transition = threading.Thread(target=node.transition, args=("deactivate",))
    transition.start()
    wait_until(lambda: node.state == "deactivating", "the transition is under way")
    transition.join(0.3)
    assert transition.is_alive()
    LATCH.open()
    transition.join(5)
    assert node.state == "inactive"
    assert node.transition("activate")
    assert chunks.next()[0].epoch > chunks.messages[count - 1].epoch
    assert {c.epoch for c in chunks.messages[count:]} == {chunks.messages[-1].epoch}


def test_a_replay_that_outlasts_the_bound_finalizes_the_node(rig: Rig) -> None:
    default_robot(rig).start()
    node = rig.active_policy({"stop_timeout": 0.2})
    LATCH.close()
    wait_until(LATCH.entered.is_set, "a replay is under way")
    assert not node.transition("deactivate")  # returns, though the replay goes on until the latch opens
    assert node.state == "finalized"
    LATCH.open()


def test_everything_is_answered_while_a_long_replay_runs(rig: Rig) -> None:
    default_robot(rig).start()
    rig.active_policy({"capsules.timeout": 0.3})
    LATCH.close()
    wait_until(LATCH.entered.is_set, "a replay is under way")
    answer_all(rig, "active")
    assert LATCH.entered.is_set()


def test_everything_is_answered_while_the_policy_loads(rig: Rig) -> None:
    node = rig.policy({**PROBE, "policy.load_time": 1.5})
    transition = threading.Thread(target=node.transition, args=("configure",))
    transition.start()
    wait_until(lambda: node.state == "configuring", "the policy loads")
    assert state(rig) == "configuring"
    values = rig.call(GetParameters, "policy/get_parameters", GetParameters.Request(names=["rate_hz"])).values
    assert values[0].double_value == PROBE["rate_hz"]
    assert not change(rig, label="configure")  # one at a time
    assert transition.is_alive()
    transition.join(10)
    assert state(rig) == "inactive"


def answer_all(rig: Rig, expected: str) -> None:
    assert state(rig) == expected
    transitions = rig.call(
        GetAvailableTransitions, "policy/get_available_transitions", GetAvailableTransitions.Request()
    )
    assert {t.transition.label for t in transitions.available_transitions} >= {"deactivate", "shutdown"}
    values = rig.call(GetParameters, "policy/get_parameters", GetParameters.Request(names=["policy.name"])).values
    assert values[0].string_value == "probe"
    for kind, name in SERVICES:
        expected_cause = CapsuleResult.SUCCESS if kind is ListCapsules else CapsuleResult.BAD_NAME
        assert rig.call(kind, name, kind.Request()).result.cause == expected_cause
    saved = rig.call(Snapshot, "snapshot", Snapshot.Request(name="later"), timeout=DEADLINE, retry=False).result
    assert saved.cause == CapsuleResult.BUSY
    assert "busy for 0.3 s" in saved.message


def test_autostart_brings_the_node_to_active(rig: Rig) -> None:
    default_robot(rig).start()
    chunks = record_chunks(rig)
    node = rig.policy({**PROBE, "autostart": True})
    assert chunks.next()
    assert node.state == "active"


def test_autostart_that_fails_leaves_the_node_unconfigured_and_alive(rig: Rig) -> None:
    errors = record_errors(rig)
    rig.policy({**PROBE, "autostart": True, "policy.checkpoint": "/no/such/file"})
    errors.wait_for(lambda m: m.msg.startswith("configure failed: checkpoint '/no/such/file'"), "configure failed")
    wait_until(lambda: state(rig) == "unconfigured", "the node is unconfigured")


@pytest.mark.parametrize(
    "steps", [(), ("configure",), ("configure", "activate")], ids=["unconfigured", "inactive", "active"]
)
def test_shutdown_from_every_state(rig: Rig, steps: tuple[str, ...]) -> None:
    node: PolicyNode = rig.policy(PROBE)
    for step in steps:
        assert node.transition(step)
    assert change(rig, label="shutdown")
    assert state(rig) == "finalized"


def test_the_status_follows_the_lifecycle(rig: Rig) -> None:
    statuses: Recorder = record_status(rig)
    node = rig.policy(PROBE)
    assert node.transition("configure")
    inactive = statuses.wait_for(lambda m: m.state.label == "inactive", "inactive")
    assert "not active" in inactive.reason
    assert node.transition("activate")
    statuses.wait_for(lambda m: m.state.label == "active", "active")
    assert node.transition("deactivate")
    start = len(statuses)
    statuses.wait_for(lambda m: m.state.label == "inactive", "inactive again", start=start - 1)
