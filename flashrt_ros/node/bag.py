"""Observations out of a ROS 2 recording (bag folder or MCAP file), read with the parsers that the live node uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..policies.base import Policy
from ..policies.pixels import PixelOrder
from ..policies.samples import Sample, SampleError, check_sample
from .cdr import CdrError, parse_compressed_image, parse_image, parse_joint_state, parse_string
from .frame import Frame, ImageError
from .images import image_to_frame
from .joints import JointError, StateReader

_IMAGE, _COMPRESSED = "sensor_msgs/msg/Image", "sensor_msgs/msg/CompressedImage"
_TYPES: Mapping[str, tuple[str, ...]] = {
    "joint_states": ("sensor_msgs/msg/JointState",),
    "instruction": ("std_msgs/msg/String",),
}


@dataclass(frozen=True)
class BagOptions:
    """How to read a recording.

    Attributes:
        topics: topic of each view, of "joint_states" and of "instruction".
        every: seconds between two observations.
        max_age: seconds that the newest message of a view or of joint_states may be old.
        instruction: used until the recording has one.
    """

    topics: Mapping[str, str]
    every: float = 1.0
    max_age: float = 0.5
    instruction: str = ""


def read_bag(path: Path, policy: Policy, options: BagOptions, limit: int) -> list[Sample]:
    """At most `limit` observations, each at a frame of the policy's first view, with the newest of everything else.

    Raises:
        SampleError: no such recording, a topic that is missing or of another type, a message that is damaged or not of
            this policy, or no moment at which everything was there.
    """
    try:
        from rosbags.rosbag2 import Reader
    except ImportError:
        raise SampleError("a recording needs rosbags; install it with `pip install flashrt_ros[recordings]`") from None
    moments = _Moments(path, policy, options)
    try:
        with Reader(path) as reader:
            samples = list(moments.read(reader, limit))
    except SampleError:
        raise
    except Exception as error:  # on damaged bytes the library raises whatever its parsers and SQLite raise
        raise SampleError(f"cannot read recording '{path}': {type(error).__name__}: {error}") from None
    if not samples:
        raise SampleError(
            f"recording '{path}' has no moment at which {', '.join(moments.wanted)} were all there, none older than "
            f"{options.max_age} s; last missing: {moments.missing or 'the first view'}"
        )
    return samples


@dataclass
class _Latest:
    """The newest message of a stream: its bytes, and when it was recorded (ns)."""

    kind: str
    raw: bytes
    time: int


@dataclass
class _Moments:
    path: Path
    policy: Policy
    options: BagOptions
    latest: dict[str, _Latest] = field(default_factory=dict)
    missing: str = ""

    def __post_init__(self) -> None:
        self._states = StateReader(self.policy.state_names, f"policy '{self.policy.name}'")

    @property
    def wanted(self) -> tuple[str, ...]:
        """Streams that every observation needs."""
        return (*self.policy.views, *(["joint_states"] if self.policy.state_names else []))

    def read(self, reader: Any, limit: int) -> Iterator[Sample]:
        streams = self._streams(reader.connections)
        due, first = 0, self.policy.views[0]
        chosen = [item for item in reader.connections if item.id in streams]
        for connection, time, raw in reader.messages(connections=chosen):
            stream = streams[connection.id]
            self.latest[stream] = _Latest(connection.msgtype, bytes(raw), time)
            if stream == first and time >= due and self._complete(time):
                yield self._sample(time)
                limit -= 1
                due = time + round(self.options.every * 1e9)
            if not limit:
                return

    def _streams(self, connections: Any) -> dict[int, str]:
        """Number of a connection → stream; SampleError for a topic that is missing or of another type."""
        found: dict[int, str] = {}
        for stream in (*self.wanted, "instruction"):
            topic = "/" + self.options.topics[stream].lstrip("/")
            types = _TYPES.get(stream, (_IMAGE, _COMPRESSED))
            matching = [item for item in connections if "/" + item.topic.lstrip("/") == topic]
            wrong = [item.msgtype for item in matching if item.msgtype not in types]
            if wrong:
                raise SampleError(f"recording '{self.path}': '{topic}' is {wrong[0]}, expected {' or '.join(types)}")
            if not matching and not (stream == "instruction" and self.options.instruction):
                recorded = ", ".join(sorted({item.topic for item in connections})) or "nothing"
                raise SampleError(
                    f"recording '{self.path}' has no topic '{topic}' for {stream}; it has: {recorded}. Name it with "
                    f"--topic {stream}=TOPIC" + (", or give --instruction" if stream == "instruction" else "")
                )
            found |= {item.id: stream for item in matching}
        return found

    def _complete(self, time: int) -> bool:
        oldest = time - round(self.options.max_age * 1e9)
        absent = [name for name in self.wanted if name not in self.latest or self.latest[name].time < oldest]
        if not absent and "instruction" not in self.latest and not self.options.instruction:
            absent = ["instruction"]
        self.missing = absent[0] if absent else ""
        return not absent

    def _sample(self, time: int) -> Sample:
        where = f"'{self.path}' at {time / 1e9:.3f} s"
        try:
            images = {view: rgb(self._frame(self.latest[view])) for view in self.policy.views}
            sample = Sample(images, self._state(), self._instruction(), where)
        except (CdrError, ImageError, JointError) as error:
            raise SampleError(f"{where}: {error}") from None
        check_sample(sample, self.policy)
        return sample

    def _frame(self, message: _Latest) -> Frame:
        parse = parse_compressed_image if message.kind == _COMPRESSED else parse_image
        return image_to_frame(parse(message.raw))

    def _state(self) -> NDArray[np.float32] | None:
        if not self.policy.state_names:
            return None
        message = parse_joint_state(self.latest["joint_states"].raw)
        return self._states.read(message.names, message.position)

    def _instruction(self) -> str:
        message = self.latest.get("instruction")
        return self.options.instruction if message is None else parse_string(message.raw).data


def rgb(frame: Frame) -> NDArray[np.uint8]:
    """uint8[height, width, 3] of a frame of any order; alpha is dropped, grey repeated."""
    pixels = frame.pixels
    if frame.order is PixelOrder.MONO:
        pixels = np.repeat(pixels, 3, axis=2)
    elif frame.order is PixelOrder.BGR:
        pixels = pixels[:, :, 2::-1]
    return np.ascontiguousarray(pixels[:, :, :3])
