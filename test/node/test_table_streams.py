"""The rows of "Inputs that have broken other people's nodes" about topics, their quality of service and their time."""

from __future__ import annotations

import pytest
from builtin_interfaces.msg import Time
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import CompressedImage
from std_msgs.msg import String

from flashrt_ros.msg import EngineStatus, Refusal, StreamStatus
from flashrt_ros.node.demo.operator_node import nanoseconds
from test.node.latch import LATCH
from test.node.rig import PROBE, Recorder, Rig, record_chunks, record_status, wait_until
from test.node.robot import BEST_EFFORT, RELIABLE, Robot, default_robot, image_message, solid
from test.node.sim_clock import SimClock

HOUR = 3600.0


def stream_of(status: EngineStatus, name: str) -> StreamStatus:
    return next(stream for stream in status.streams if stream.name == name)


def causes_of(stream: StreamStatus) -> dict[int, int]:
    return {refusal.cause: refusal.count for refusal in stream.refusals}


def wait_for_refusal(statuses: Recorder, stream: str, cause: int) -> StreamStatus:
    """The stream's status once it counted a refusal for `cause`."""
    message = statuses.wait_for(lambda m: cause in causes_of(stream_of(m, stream)), f"'{stream}' refused for {cause}")
    return stream_of(message, stream)


@pytest.mark.parametrize("camera", [BEST_EFFORT, RELIABLE], ids=["best_effort_camera", "reliable_camera"])
def test_reliable_and_best_effort_publishers_both_reach_the_node(rig: Rig, camera: QoSProfile) -> None:
    robot = Robot(rig)
    for view in ("front", "wrist"):
        robot.camera(view, image_message(solid(1, 2, 3)), qos=camera)
    robot.joints(qos=camera).start()
    chunks = record_chunks(rig)
    rig.active_policy()
    assert chunks.next(2)


@pytest.mark.parametrize("durability", [DurabilityPolicy.VOLATILE, DurabilityPolicy.TRANSIENT_LOCAL])
def test_volatile_and_transient_local_instructions_both_reach_the_node(rig: Rig, durability: DurabilityPolicy) -> None:
    default_robot(rig).start()
    chunks = record_chunks(rig)
    rig.active_policy({"instruction": ""})
    qos = QoSProfile(depth=1, reliability=ReliabilityPolicy.RELIABLE, durability=durability)
    publisher = rig.node.create_publisher(String, "instruction", qos)
    wait_until(publisher.get_subscription_count, "the node listens for instructions")
    publisher.publish(String(data="lift the cup"))
    assert chunks.next()[0].instruction == "lift the cup"


@pytest.mark.parametrize(
    ("offset", "stamp", "cause"),
    [
        (0.0, Time(), Refusal.ZERO_STAMP),
        (-HOUR, None, Refusal.HEADER_TOO_OLD),
        (10.0, None, Refusal.FROM_THE_FUTURE),
    ],
    ids=["zero", "an_hour_old", "ten_seconds_in_the_future"],
)
@pytest.mark.parametrize("stream", ["wrist", "joint_states"])
def test_wrong_stamps_are_refused_with_a_reason_and_counted(
    rig: Rig, stream: str, offset: float, stamp: Time | None, cause: int
) -> None:
    robot = default_robot(rig)
    robot.sensors[stream].stamp_offset, robot.sensors[stream].stamp = offset, stamp
    robot.start()
    chunks, statuses = record_chunks(rig), record_status(rig)
    rig.active_policy()
    refused = wait_for_refusal(statuses, stream, cause)
    assert f"/{stream}" in refused.reason or f"'{stream}'" in refused.reason
    assert refused.state in (StreamStatus.REFUSED, StreamStatus.STALE)
    assert not len(chunks)
    # Mended at the source, it works at once.
    robot.sensors[stream].stamp_offset, robot.sensors[stream].stamp = 0.0, None
    assert chunks.next()


def test_a_stamp_that_goes_backwards_is_refused_until_it_has_caught_up(rig: Rig) -> None:
    robot = default_robot(rig).start()
    chunks, statuses = record_chunks(rig), record_status(rig)
    rig.active_policy({"max_age": 5.0, "max_skew": 5.0})
    chunks.next()
    robot.sensors["front"].stamp_offset = -1.0
    refused = wait_for_refusal(statuses, "front", Refusal.BACKWARDS)
    assert "went back" in refused.reason
    assert chunks.next(timeout=5.0)  # a second later the stamps are newer than the last accepted one again


def test_two_cameras_200_ms_apart_are_refused_when_skew_exceeds_the_limit(rig: Rig) -> None:
    robot = default_robot(rig)
    robot.sensors["wrist"].stamp_offset = -0.2
    robot.start()
    chunks, statuses = record_chunks(rig), record_status(rig)
    rig.active_policy({"max_skew": 0.1})
    refused = wait_for_refusal(statuses, "wrist", Refusal.SKEW)
    assert "view 'front'" in refused.reason
    assert "view 'wrist'" in refused.reason
    assert not len(chunks)


def test_two_cameras_200_ms_apart_are_accepted_within_the_limit(rig: Rig) -> None:
    robot = default_robot(rig)
    robot.sensors["wrist"].stamp_offset = -0.2
    robot.start()
    chunks = record_chunks(rig)
    rig.active_policy({"max_skew": 0.3})
    assert chunks.next()


def test_a_killed_camera_stops_the_chunks_within_max_age_and_the_diagnostic_says_which(rig: Rig) -> None:
    robot = default_robot(rig).start()
    chunks, statuses = record_chunks(rig), record_status(rig)
    rig.active_policy({"max_age": 0.3, "rate_hz": 20.0, "max_skew": 1.0})
    chunks.next(2)
    robot.sensors["wrist"].on = False
    statuses.wait_for(lambda m: "view 'wrist' (/wrist/image_raw)" in m.reason, "the reason names wrist")
    stale = statuses.wait_for(lambda m: stream_of(m, "wrist").state == StreamStatus.STALE, "wrist is stale")
    assert "ago, limit 0.300 s" in stream_of(stale, "wrist").reason
    last_frame = nanoseconds(robot.sensors["wrist"].message.header.stamp)
    oldest = max(nanoseconds(m.oldest_observation_stamp) for m in chunks.messages)
    assert oldest <= last_frame
    # Its age is judged before a decision begins, and a busy machine may take its time in between.
    assert max(nanoseconds(m.stamp) for m in chunks.messages) - last_frame < 0.3e9 + 0.5e9
    statuses.next(2)  # a chunk that left right before is here by now
    count = len(chunks)
    statuses.next(5)
    assert len(chunks) == count
    robot.sensors["wrist"].on = True
    assert chunks.next()


def test_a_clock_that_jumps_back_begins_an_epoch_and_old_results_are_dropped(rig: Rig) -> None:
    clock = SimClock(rig, start=1000.0)
    robot = default_robot(rig)
    robot.clock = clock.now_ns
    robot.start()
    chunks, statuses = record_chunks(rig), record_status(rig)
    rig.active_policy({"use_sim_time": True})
    before = chunks.next()[0]
    assert before.stamp.sec in range(1000, 1020)
    clock.jump_to(500.0)
    after = chunks.wait_for(lambda m: m.stamp.sec < 900, "a chunk of the time after the jump")
    assert after.epoch > before.epoch
    assert after.oldest_observation_stamp.sec < 900
    late = [m for m in chunks.messages if m.stamp.sec > 900 and m.epoch >= after.epoch]
    assert not late
    assert statuses.messages[-1].epoch >= after.epoch


def test_a_result_that_a_clock_jump_overtakes_is_not_published(rig: Rig) -> None:
    clock = SimClock(rig, start=1000.0)
    robot = default_robot(rig)
    robot.clock = clock.now_ns
    robot.start()
    chunks, statuses = record_chunks(rig), record_status(rig)
    rig.active_policy({"use_sim_time": True})
    epoch = chunks.next()[-1].epoch
    LATCH.close()
    wait_until(LATCH.entered.is_set, "a replay is under way")
    count = len(chunks)
    clock.jump_to(500.0)
    statuses.wait_for(lambda m: m.epoch > epoch, "a new epoch")
    LATCH.open()
    new = chunks.next()[0]
    assert new.epoch > epoch
    assert all(m.epoch > epoch for m in chunks.messages[count:])
    statuses.wait_for(lambda m: Refusal.OLD_EPOCH in {r.cause for r in m.chunk_refusals}, "the old result is counted")


def test_without_a_clock_message_the_status_says_that_the_clock_stands_still(rig: Rig) -> None:
    statuses = record_status(rig)
    rig.active_policy({"use_sim_time": True})
    statuses.wait_for(lambda m: "/clock" in m.reason, "the reason names /clock")


def test_no_publisher_and_no_message_yet_are_told_apart(rig: Rig) -> None:
    robot = Robot(rig).camera("front", image_message(solid(1, 1, 1)))
    statuses = record_status(rig)
    rig.active_policy(PROBE)
    message = statuses.wait_for(
        lambda m: stream_of(m, "front").state == StreamStatus.NO_MESSAGE and m.state.label == "active",
        "front has a publisher that is silent",
    )
    assert "no message yet" in stream_of(message, "front").reason
    assert stream_of(message, "wrist").state == StreamStatus.NO_PUBLISHER
    assert "nobody publishes" in stream_of(message, "wrist").reason
    robot.start()
    statuses.wait_for(lambda m: stream_of(m, "front").state == StreamStatus.OK, "front is ok")


def test_an_incompatible_quality_of_service_is_reported_with_topic_and_policy(rig: Rig) -> None:
    """A reliable instruction subscription never hears a best-effort publisher."""
    statuses = record_status(rig)
    rig.active_policy({"instruction": ""})
    rig.node.create_publisher(String, "instruction", BEST_EFFORT)
    message = statuses.wait_for(
        lambda m: stream_of(m, "instruction").state == StreamStatus.INCOMPATIBLE_QOS, "incompatible"
    )
    assert "/instruction" in stream_of(message, "instruction").reason
    assert "RELIABILITY" in stream_of(message, "instruction").reason


def test_a_topic_of_another_type_is_named(rig: Rig) -> None:
    # In a context of its own: one participant cannot have two types on one topic.
    other = Rig(rig.domain)
    rig.at_end(other.close)
    other.node.create_publisher(CompressedImage, "front/image_raw", BEST_EFFORT)
    statuses = record_status(rig)
    rig.active_policy()
    message = statuses.wait_for(lambda m: "CompressedImage" in stream_of(m, "front").reason, "the type is named")
    assert "views" in stream_of(message, "front").reason
