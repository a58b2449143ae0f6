"""Topics as the graph sees them, the status, and the diagnostics."""

from __future__ import annotations

import math
from typing import Any

import pytest
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from rclpy.qos import DurabilityPolicy, ReliabilityPolicy

from flashrt_ros.msg import ActionChunk, EngineStatus
from flashrt_ros.node.demo.operator_node import nanoseconds
from test.node.rig import PROBE, Recorder, Rig, record_chunks, record_status, wait_until
from test.node.robot import default_robot

BEST_EFFORT, RELIABLE = ReliabilityPolicy.BEST_EFFORT, ReliabilityPolicy.RELIABLE
VOLATILE, TRANSIENT_LOCAL = DurabilityPolicy.VOLATILE, DurabilityPolicy.TRANSIENT_LOCAL


def entries(message: DiagnosticArray) -> dict[str, DiagnosticStatus]:
    return {status.name: status for status in message.status}


@pytest.mark.parametrize(
    ("topic", "kind", "reliability", "durability"),
    [
        ("/front/image_raw", "sensor_msgs/msg/Image", BEST_EFFORT, VOLATILE),
        ("/wrist/image_raw/compressed", "sensor_msgs/msg/CompressedImage", BEST_EFFORT, VOLATILE),
        ("/joint_states", "sensor_msgs/msg/JointState", BEST_EFFORT, VOLATILE),
        ("/instruction", "std_msgs/msg/String", RELIABLE, VOLATILE),
        ("/action_chunk", "flashrt_ros/msg/ActionChunk", RELIABLE, VOLATILE),
        ("/policy/status", "flashrt_ros/msg/EngineStatus", RELIABLE, TRANSIENT_LOCAL),
    ],
)
def test_every_endpoint_has_the_documented_type_and_quality_of_service(
    rig: Rig, topic: str, kind: str, reliability: ReliabilityPolicy, durability: DurabilityPolicy
) -> None:
    node = rig.policy({**PROBE, "views.wrist.compressed": True})
    assert node.transition("configure")

    def endpoints() -> list[Any]:
        both = rig.node.get_publishers_info_by_topic(topic) + rig.node.get_subscriptions_info_by_topic(topic)
        return [info for info in both if info.node_name == "policy"]

    (info,) = wait_until(endpoints, f"an endpoint on {topic}")
    assert info.topic_type == kind
    assert info.qos_profile.reliability == reliability
    assert info.qos_profile.durability == durability


def test_relative_names_follow_the_namespace_and_topics_may_be_remapped(rig: Rig) -> None:
    arguments = ["--ros-args", "-r", "joint_states:=/arm/joints"]
    node = rig.policy({**PROBE, "views.front.topic": "/cam0/image"}, namespace="left", cli_args=arguments)
    statuses = record_status(rig, "/left/policy")
    assert node.transition("configure")
    status = statuses.wait_for(lambda m: m.streams, "a status")
    topics = {stream.name: stream.topic for stream in status.streams}
    assert topics == {
        "front": "/cam0/image",
        "wrist": "/left/wrist/image_raw",
        "joint_states": "/arm/joints",
        "instruction": "/left/instruction",
    }
    assert node.count_publishers("/left/action_chunk") == 1


def test_who_joins_late_gets_the_status_and_no_old_chunk(rig: Rig) -> None:
    robot = default_robot(rig).start()
    chunks = record_chunks(rig)
    rig.active_policy({"status_period": 60.0, "max_age": 0.2})
    chunks.next(2)
    robot.stop()
    wait_until(lambda: rig.quiet(chunks, 0.5), "the chunks stop")
    late_status = Recorder(rig, EngineStatus, "policy/status", latched=True)
    late_chunks = Recorder(rig, ActionChunk, "action_chunk", latched=False)
    late_status.wait_for(lambda m: m.state.label == "active", "the latched status")
    assert rig.quiet(late_chunks)
    assert not len(late_chunks)


def test_the_status_tells_the_plan_and_how_it_fares(rig: Rig) -> None:
    default_robot(rig).start()
    chunks, statuses = record_chunks(rig), record_status(rig)
    node = rig.active_policy({"warmup": 3})
    chunks.next(5)
    status = statuses.wait_for(lambda m: m.chunks_published >= 5, "five chunks are counted")
    assert (status.policy, status.checkpoint, status.device, status.ingest_path) == (
        "probe",
        "preset:probe",
        "cpu",
        "host",
    )
    assert status.fingerprint == chunks.messages[0].fingerprint
    assert len(status.fingerprint) == 64
    assert status.fidelity == "16-bit, nothing to pass"
    assert [(k.op, k.kernel, k.fallback) for k in status.kernels] == [("all", "reference", False)]
    assert status.epoch == chunks.messages[-1].epoch
    assert status.instruction == PROBE["instruction"]
    assert status.target_rate == PROBE["rate_hz"]
    assert status.reason == ""
    assert status.bytes_copied_per_frame == 6 * 8 * 3
    assert 0 < status.session_time.p50 <= status.latency.maximum
    assert status.latency.count == status.session_time.count == status.overhead.count == status.chunks_published
    # Warm-up left out. A decision may have been replayed, and not yet be published, when the status was made.
    replays = {stage.name: stage.replays for stage in status.stages}
    assert 0 <= replays["act"] - status.chunks_published - status.chunks_dropped <= 1
    front = status.streams[0]
    assert (front.name, front.topic, front.required, front.publishers) == ("front", "/front/image_raw", True, 1)
    assert front.received >= front.used + front.overwritten
    assert front.used >= 4  # the frame of the newest chunk is counted right after that
    assert front.rate > 10
    assert 0 <= front.header_age < 1
    assert math.isnan(status.streams[-1].header_age)
    assert node.state == "active"


def test_diagnostics_have_an_entry_for_the_policy_and_for_each_stream(rig: Rig) -> None:
    diagnostics = Recorder(rig, DiagnosticArray, "/diagnostics")
    node = rig.policy(PROBE)
    assert node.transition("configure")
    found = entries(diagnostics.wait_for(lambda m: m.status, "diagnostics"))
    assert set(found) == {
        "policy: policy",
        "policy: front",
        "policy: wrist",
        "policy: joint_states",
        "policy: instruction",
    }
    assert found["policy: policy"].level == DiagnosticStatus.WARN
    assert found["policy: front"].level == DiagnosticStatus.WARN
    assert node.transition("activate")
    diagnostics.wait_for(lambda m: entries(m)["policy: front"].level == DiagnosticStatus.ERROR, "front is missing")
    default_robot(rig).start()
    message = diagnostics.wait_for(
        lambda m: all(entry.level == DiagnosticStatus.OK for entry in m.status), "everything is well"
    )
    values = {pair.key: pair.value for pair in entries(message)["policy: policy"].values}
    assert values["policy"] == "probe"
    assert int(values["chunks published"]) > 0


def test_with_image_wait_no_frame_is_decided_on_twice(rig: Rig) -> None:
    default_robot(rig, rate=8.0).start()
    chunks = record_chunks(rig)
    rig.active_policy({"rate_hz": 100.0, "image_wait": 1.0})
    stamps = [(m.oldest_observation_stamp.sec, m.oldest_observation_stamp.nanosec) for m in chunks.next(6)]
    assert len(set(stamps)) == len(stamps)


def test_without_image_wait_a_decision_takes_what_is_there(rig: Rig) -> None:
    default_robot(rig, rate=8.0).start()
    chunks = record_chunks(rig)
    rig.active_policy({"rate_hz": 100.0, "image_wait": 0.0})
    stamps = [(m.oldest_observation_stamp.sec, m.oldest_observation_stamp.nanosec) for m in chunks.next(12)]
    assert len(set(stamps)) < len(stamps)


def test_a_tick_during_a_long_decision_is_skipped_and_counted(rig: Rig) -> None:
    default_robot(rig).start()
    statuses = record_status(rig)
    rig.active_policy({"policy.delay": 0.2, "rate_hz": 50.0})
    status = statuses.wait_for(lambda m: m.chunks_published >= 2, "two chunks")
    assert status.ticks_skipped > status.chunks_published


def test_an_instruction_published_the_moment_the_node_listens_is_followed(rig: Rig) -> None:
    robot = default_robot(rig).start()
    chunks = record_chunks(rig)
    node = rig.policy({**PROBE, "instruction": ""})
    for attempt in range(4):
        wait_until(lambda: robot.listeners == 0, "the subscription of before is gone")
        rig.in_background(lambda text=f"attempt {attempt}": robot.tell(text))  # type: ignore[misc]
        assert node.transition("configure")
        assert node.transition("activate")
        expected = f"attempt {attempt}"
        chunks.wait_for(lambda m, text=expected: m.instruction == text, expected)  # type: ignore[misc]
        assert node.transition("deactivate")
        assert node.transition("cleanup")


def test_a_chunk_says_when_from_what_and_under_which_plan(rig: Rig) -> None:
    default_robot(rig).start()
    chunks = record_chunks(rig)
    rig.active_policy({"policy.delay": 0.03, "policy.action_dt": 0.25, "policy.chunk": 3})
    received = [(chunk, rig.node.get_clock().now().nanoseconds) for chunk in chunks.next(3)]
    for chunk, now_ns in received:
        stamp, duration = nanoseconds(chunk.stamp), nanoseconds(chunk.inference_duration)
        assert nanoseconds(chunk.inference_start) == stamp
        assert nanoseconds(chunk.dt) == 250_000_000
        assert nanoseconds(chunk.valid_until) == stamp + 3 * 250_000_000
        assert stamp - 1_000_000_000 < nanoseconds(chunk.oldest_observation_stamp) <= stamp
        assert 30_000_000 <= duration <= now_ns - stamp
        assert chunk.horizon == 3
        assert len(chunk.data) == 3 * len(chunk.joint_names)
        assert (chunk.session, chunk.capsule, chunk.frozen_prefix) == ("main", "", 0)
        assert chunk.instruction == PROBE["instruction"]
    ids = [chunk.chunk_id for chunk, _ in received]
    assert ids == [1, 2, 3]
