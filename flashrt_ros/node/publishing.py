"""Action chunks as messages."""

from __future__ import annotations

import array
import time
from dataclasses import dataclass, replace

import numpy as np
from builtin_interfaces.msg import Duration, Time
from numpy.typing import NDArray
from rclpy.node import Node
from rclpy.qos import QoSProfile, ReliabilityPolicy

from ..msg import ActionChunk

# Volatile: who joins late must not get an old chunk.
_QOS = QoSProfile(depth=1, reliability=ReliabilityPolicy.RELIABLE)
_SECOND = 1_000_000_000


@dataclass(frozen=True, slots=True)
class ChunkOrigin:
    """Where a chunk comes from.

    `oldest_observation_ns` and `start_ns`, when the windows began to be filled, are of the node clock;
    `start_steady_ns` is the latter moment on the steady clock. `capsule` is what the epoch began from, empty for none.
    """

    session: str
    capsule: str
    epoch: int
    instruction: str
    oldest_observation_ns: int
    start_ns: int
    start_steady_ns: int

    def again(self, now_ns: int, steady_ns: int) -> ChunkOrigin:
        """The same origin for a chunk that starts now."""
        return replace(self, start_ns=now_ns, start_steady_ns=steady_ns)


class ChunkPublisher:
    """Publishes chunks on `action_chunk`. It does not judge them, and belongs to one thread.

    Args:
        node: that publishes.
        joint_names: the columns of every chunk.
        dt: time between two steps (s).
        fingerprint: of the contract.
    """

    def __init__(self, node: Node, joint_names: tuple[str, ...], dt: float, fingerprint: str) -> None:
        self._node = node
        self._publisher = node.create_publisher(ActionChunk, "action_chunk", _QOS)
        self._dt_ns = round(dt * _SECOND)
        # One message for all chunks: to make a new one checks every joint name again, which takes longer than to send
        # it.
        self._message = ActionChunk(
            dt=duration_message(self._dt_ns), joint_names=list(joint_names), fingerprint=fingerprint
        )

    def valid_until_ns(self, origin: ChunkOrigin, steps: int) -> int:
        """End of the last step of a chunk of that origin (node clock)."""
        return origin.start_ns + steps * self._dt_ns

    def publish(self, chunk_id: int, chunk: NDArray[np.float32], origin: ChunkOrigin) -> None:
        """Publish `chunk`, float32[steps, joints], whose step 0 is due when its inference started."""
        message = self._message
        message.stamp = message.inference_start = time_message(origin.start_ns)
        message.oldest_observation_stamp = time_message(origin.oldest_observation_ns)
        message.valid_until = time_message(self.valid_until_ns(origin, len(chunk)))
        message.session = origin.session
        message.capsule = origin.capsule
        message.epoch = origin.epoch
        message.chunk_id = chunk_id
        message.horizon = len(chunk)
        message.data = float_array(chunk)
        message.instruction = origin.instruction
        message.inference_duration = duration_message(time.monotonic_ns() - origin.start_steady_ns)
        self._publisher.publish(message)

    def close(self) -> None:
        """Take the publisher down."""
        self._node.destroy_publisher(self._publisher)


def float_array(values: NDArray[np.float32]) -> array.array[float]:
    """Row-major values as the one container that a `float32[]` field takes without looking at every element."""
    result = array.array("f")
    result.frombytes(values.tobytes())
    return result


def time_message(nanoseconds: int) -> Time:
    """A moment of the node clock."""
    seconds, rest = divmod(nanoseconds, _SECOND)
    return Time(sec=seconds, nanosec=rest)


def duration_message(nanoseconds: int) -> Duration:
    """A span of time."""
    seconds, rest = divmod(nanoseconds, _SECOND)
    return Duration(sec=seconds, nanosec=rest)
