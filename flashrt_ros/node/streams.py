"""Input streams: a subscription each, and its newest message; nothing is read, converted or copied until a decision."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rclpy.event_handler import SubscriptionEventCallbacks
from rclpy.node import Node
from rclpy.qos import QoSProfile, ReliabilityPolicy, qos_policy_name_from_kind
from sensor_msgs.msg import CompressedImage, Image, JointState
from std_msgs.msg import String

from .cdr import (
    CompressedImageMessage,
    ImageMessage,
    JointStateMessage,
    StringMessage,
    parse_compressed_image,
    parse_image,
    parse_joint_state,
    parse_string,
)
from .statistics import RateMeter, RollingWindow

Message = ImageMessage | CompressedImageMessage | JointStateMessage | StringMessage

# "Sensor data" of ROS 2 keeps five messages; only the newest one is of use here.
NEWEST_BEST_EFFORT = QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)
# Volatile, because a transient-local subscription never hears `ros2 topic pub`.
NEWEST_RELIABLE = QoSProfile(depth=1, reliability=ReliabilityPolicy.RELIABLE)

# Longer than it takes a thread to wake up, and too short to be felt by anybody else.
_HANDOVER_S = 2e-4
_RATE_HORIZON_S = 5.0
_AGES_KEPT = 1000


@dataclass(frozen=True)
class Kind:
    """What a stream carries: message type, how its bytes are read, and its quality of service."""

    message_type: Any
    parse: Callable[[bytes], Message]
    qos: QoSProfile


STATE = "joint_states"
INSTRUCTION = "instruction"

IMAGE = Kind(Image, parse_image, NEWEST_BEST_EFFORT)
COMPRESSED_IMAGE = Kind(CompressedImage, parse_compressed_image, NEWEST_BEST_EFFORT)
JOINT_STATE = Kind(JointState, parse_joint_state, NEWEST_BEST_EFFORT)
TEXT = Kind(String, parse_string, NEWEST_RELIABLE)


@dataclass(frozen=True, slots=True, eq=False)
class Received:
    """One serialised message, when it came (steady clock, ns) and the how-manyth of its stream it is."""

    raw: bytes
    steady_ns: int
    serial: int


class Arrival:
    """Where the worker waits for messages.

    Attributes: `condition`, to be held while the newest message of a stream is replaced.
    """

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self._awaited = False

    def wait_for(self, holds: Callable[[], bool], timeout: float) -> None:
        """Wait until `holds()`, which is asked at each message; `timeout` s at most."""
        with self.condition:
            self._awaited = True
            try:
                self.condition.wait_for(holds, timeout)
            finally:
                self._awaited = False

    def hand_over(self) -> None:
        """Let whoever waits run now. Called by the executor's thread after a message, without the condition.

        A decision would otherwise begin only when the executor has prepared its next wait: half a millisecond of
        Python, during which it holds the interpreter's lock.
        """
        if self._awaited:
            time.sleep(_HANDOVER_S)


class Stream:
    """One input. The executor's thread writes the newest message, the worker's thread takes it.

    Args:
        node: that subscribes.
        name: view name, "joint_states" or "instruction".
        topic: to subscribe to; relative names and remaps as usual.
        kind: of message.
        arrival: notified at each message.
        on_message: called with each message afterwards, in the executor's thread.

    Attributes: `newest`, the message in the slot; `refusals`, cause → (count, words of the last time); `last_refusal`,
    cause and words of the newest check, None if it found nothing; `incompatible_qos`, the policy in which a publisher
    differs, empty if none does.
    """

    def __init__(
        self,
        node: Node,
        name: str,
        topic: str,
        kind: Kind,
        arrival: Arrival,
        on_message: Callable[[Received], None],
    ) -> None:
        self.name = name
        self.kind = kind
        self.newest: Received | None = None
        self.refusals: dict[int, tuple[int, str]] = {}
        self.last_refusal: tuple[int, str] | None = None
        self.incompatible_qos = ""
        self.rate = RateMeter(_RATE_HORIZON_S)
        self.ages = RollingWindow(_AGES_KEPT)
        self.used = 0
        self.overwritten = 0
        self._used_serial = 0
        self._arrival = arrival
        self._on_message = on_message
        self._node = node
        events = SubscriptionEventCallbacks(incompatible_qos=self._on_incompatible_qos)
        self.subscription = node.create_subscription(
            kind.message_type, topic, self._receive, kind.qos, event_callbacks=events, raw=True
        )
        self.topic: str = self.subscription.topic_name

    @property
    def description(self) -> str:
        """How messages to people name the stream."""
        what = self.name if self.name in (STATE, INSTRUCTION) else f"view '{self.name}'"
        return f"{what} ({self.topic})"

    @property
    def publishers(self) -> int:
        """Publishers that match the subscription."""
        return int(self.subscription.get_publisher_count())

    def drop(self) -> None:
        """Forget the newest message."""
        self.newest = None
        self.last_refusal = None

    def mark_used(self, received: Received, age_ns: int | None = None) -> None:
        """Count `received` as used by a decision, `age_ns` after its stamp if it has one."""
        if age_ns is not None:
            self.ages.add(age_ns / 1e9)
        with self._arrival.condition:
            if received.serial == self._used_serial:
                return
            self._used_serial = received.serial
            self.used += 1
            if self.newest is not received and self.overwritten:  # replaced since the decision looked
                self.overwritten -= 1

    def refuse(self, cause: int, text: str) -> None:
        """Count a refusal of the newest message."""
        self.refusals[cause] = (self.refusals.get(cause, (0, ""))[0] + 1, text)
        self.last_refusal = (cause, text)

    def close(self) -> None:
        """Unsubscribe."""
        self._node.destroy_subscription(self.subscription)

    def _receive(self, raw: bytes) -> None:
        steady_ns = time.monotonic_ns()
        self.rate.tick(steady_ns)
        received = Received(raw, steady_ns, self.rate.total)
        with self._arrival.condition:
            if self.newest is not None and self.newest.serial != self._used_serial:
                self.overwritten += 1
            self.newest = received
            self._arrival.condition.notify_all()
        self._arrival.hand_over()
        self._on_message(received)

    def _on_incompatible_qos(self, event: Any) -> None:
        policy = qos_policy_name_from_kind(event.last_policy_kind)
        self.incompatible_qos = str(policy)
        self._node.get_logger().error(
            f"{self.description}: a publisher offers an incompatible {policy}, so nothing of it will arrive; "
            f"this subscription asks for {self.kind.qos.reliability.name} and {self.kind.qos.durability.name}"
        )


class StreamSet:
    """The streams of one node, in the order in which they were added.

    Args:
        node: that subscribes.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._streams: dict[str, Stream] = {}
        self._arrival = Arrival()

    def add(self, name: str, topic: str, kind: Kind, on_message: Callable[[Received], None] = lambda _: None) -> Stream:
        """Subscribe to one more topic."""
        stream = Stream(self._node, name, topic, kind, self._arrival, on_message)
        self._streams[name] = stream
        return stream

    def __getitem__(self, name: str) -> Stream:
        return self._streams[name]

    def __iter__(self) -> Iterator[Stream]:
        return iter(self._streams.values())

    def drop(self) -> None:
        """Forget the newest observation of each stream. An instruction is none: it stays until the next one."""
        for stream in self:
            if stream.name != INSTRUCTION:
                stream.drop()

    def wait_newer(self, names: Sequence[str], after_ns: int, timeout: float, given_up: Callable[[], bool]) -> None:
        """Wait until each of `names` has a message that came after `after_ns` (steady clock).

        Args:
            names: of streams.
            after_ns: steady clock.
            timeout: longest wait (s).
            given_up: asked at each message and each `wake`; true ends the wait.
        """

        def complete() -> bool:
            newest = (self._streams[name].newest for name in names)
            return given_up() or all(got is not None and got.steady_ns >= after_ns for got in newest)

        self._arrival.wait_for(complete, timeout)

    def wake(self) -> None:
        """Make `wait_newer` look again whether to give up."""
        with self._arrival.condition:
            self._arrival.condition.notify_all()

    def close(self) -> None:
        """Unsubscribe from everything."""
        for stream in self:
            stream.close()
        self._streams.clear()
