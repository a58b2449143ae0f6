"""The node of the parent process: gives the instructions, and records what arrives."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import rclpy
from builtin_interfaces.msg import Duration, Time
from rcl_interfaces.msg import Log
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy, qos_profile_sensor_data
from rclpy.signals import SignalHandlerOptions
from rclpy.subscription import Subscription
from sensor_msgs.msg import Image, JointState
from std_msgs.msg import String

from flashrt_ros.msg import ActionChunk, EngineStatus

from .recording import ReceivedChunk, Recording, Refused, Status, StreamCounts
from .scene import CAMERAS, Camera

_RELIABLE = QoSProfile(depth=20, reliability=ReliabilityPolicy.RELIABLE)
_LATCHED = QoSProfile(depth=1, reliability=ReliabilityPolicy.RELIABLE, durability=DurabilityPolicy.TRANSIENT_LOCAL)
_LATCHED_MANY = QoSProfile(
    depth=100, reliability=ReliabilityPolicy.RELIABLE, durability=DurabilityPolicy.TRANSIENT_LOCAL
)


class Operator:
    """Publishes instructions and fills a Recording from the policy node's topics.

    A context: it owns its rclpy context, which is shut down on leaving. Environment variables that configure DDS
    must be set before.

    Args:
        policy_node: name of the policy node, whose `~/status` is read.

    Attributes: `recording`; `status_message`, the newest EngineStatus, None before the first; `failed_transitions`,
    what the policy node logged about them.
    """

    def __init__(self, policy_node: str) -> None:
        self.recording = Recording()
        self.status_message: EngineStatus | None = None
        self.failed_transitions: list[str] = []
        self._policy_node = policy_node
        self._context = rclpy.Context()
        rclpy.init(context=self._context, signal_handler_options=SignalHandlerOptions.NO)
        self._node = Node("operator", context=self._context)
        self._executor = SingleThreadedExecutor(context=self._context)
        self._executor.add_node(self._node)
        self._instruction = self._node.create_publisher(String, "/instruction", _RELIABLE)
        self._node.create_subscription(ActionChunk, "/action_chunk", self._on_chunk, _RELIABLE)
        self._node.create_subscription(EngineStatus, f"/{policy_node}/status", self._on_status, _LATCHED)
        self._node.create_subscription(JointState, "/joint_states", self._on_joints, qos_profile_sensor_data)
        # A node that cannot configure publishes no status; its log is all there is. Latched, so nothing is missed.
        self._node.create_subscription(Log, "/rosout", self._on_log, _LATCHED_MANY)
        self._cameras = {camera.view: self._subscribe_once(camera) for camera in CAMERAS}

    def instruct(self, text: str) -> None:
        """Publish an instruction, and note when, unless it is the last one again."""
        if not self.recording.instructions or self.recording.instructions[-1][1] != text:
            self.recording.instructions.append((time.time_ns(), text))
        self._instruction.publish(String(data=text))

    @property
    def is_heard(self) -> bool:
        """Whether somebody subscribes to the instruction."""
        return bool(self._instruction.get_subscription_count())

    @property
    def sees_everything(self) -> bool:
        """Whether something came from every process: a frame a camera, a joint state, a chunk."""
        recording = self.recording
        return len(recording.frames) == len(CAMERAS) and bool(recording.positions) and bool(recording.chunks)

    def spin(self, seconds: float) -> None:
        """Receive for about `seconds`."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._executor.spin_once(timeout_sec=left)

    def close(self) -> None:
        """End the node and its context."""
        self._executor.shutdown()
        self._node.destroy_node()
        self._context.try_shutdown()

    def __enter__(self) -> Operator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _on_chunk(self, message: ActionChunk) -> None:
        self.recording.chunks.append(_received(message, time.time_ns()))

    def _on_status(self, message: EngineStatus) -> None:
        self.status_message = message
        self.recording.status = _status(message)

    def _on_log(self, message: Log) -> None:
        is_failure = message.level >= Log.ERROR and message.msg.startswith(("configure ", "activate "))
        if is_failure and message.name == self._policy_node:
            self.failed_transitions.append(message.msg.splitlines()[0])

    def _on_joints(self, message: JointState) -> None:
        self.recording.joint_names = tuple(message.name)
        self.recording.positions.append((nanoseconds(message.header.stamp), tuple(message.position)))

    def _subscribe_once(self, camera: Camera) -> Subscription:
        """One frame for the report is enough: receiving them all would take a core's time from the policy."""

        def on_frame(message: Image) -> None:
            pixels = np.frombuffer(message.data, np.uint8).reshape(message.height, message.width, 3)
            rgb = pixels[:, :, ::-1] if message.encoding == "bgr8" else pixels
            self.recording.frames[camera.view] = rgb.copy()
            self._node.destroy_subscription(self._cameras[camera.view])

        return self._node.create_subscription(Image, camera.topic, on_frame, qos_profile_sensor_data)


def nanoseconds(value: Time | Duration) -> int:
    """A Time or Duration message as nanoseconds."""
    return int(value.sec) * 1_000_000_000 + int(value.nanosec)


def _received(message: ActionChunk, arrival: int) -> ReceivedChunk:
    return ReceivedChunk(
        arrival=arrival,
        stamp=nanoseconds(message.stamp),
        dt=nanoseconds(message.dt),
        oldest_observation=nanoseconds(message.oldest_observation_stamp),
        inference_start=nanoseconds(message.inference_start),
        inference_duration=nanoseconds(message.inference_duration),
        epoch=message.epoch,
        chunk_id=message.chunk_id,
        joint_names=tuple(message.joint_names),
        data=np.array(message.data, np.float32).reshape(message.horizon, len(message.joint_names)),
        instruction=message.instruction,
        fingerprint=message.fingerprint,
    )


def _status(message: EngineStatus) -> Status:
    return Status(
        state=message.state.label,
        reason=message.reason,
        policy=message.policy,
        checkpoint=message.checkpoint,
        precision=message.precision,
        device=message.device,
        fingerprint=message.fingerprint,
        instruction=message.instruction,
        chunks_published=message.chunks_published,
        ticks_skipped=message.ticks_skipped,
        stale_replays=message.stale_replays,
        session_p50=message.session_time.p50,
        bytes_copied_per_frame=message.bytes_copied_per_frame,
        replays=tuple((stage.name, stage.rate, stage.replays) for stage in message.stages),
        streams=tuple(StreamCounts(s.name, s.rate, s.header_age, s.received, s.used) for s in message.streams),
        refusals=tuple(_refusals(message)),
    )


def _refusals(message: EngineStatus) -> Iterator[Refused]:
    for what, refusals in (("chunk", message.chunk_refusals), *((s.name, s.refusals) for s in message.streams)):
        for refusal in refusals:
            yield Refused(what, refusal.cause, refusal.count, refusal.last_reason)
