"""A robot for tests: cameras and joint states, published by a thread over real DDS."""

from __future__ import annotations

import array
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from builtin_interfaces.msg import Time
from rclpy.publisher import Publisher
from rclpy.qos import QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import Image, JointState
from std_msgs.msg import String

from test.node.rig import Rig, wait_until

BEST_EFFORT = QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)
RELIABLE = QoSProfile(depth=1, reliability=ReliabilityPolicy.RELIABLE)

VIEWS = ("front", "wrist")
POSITIONS = {"a": 0.1, "b": 0.2, "c": 0.3}


def solid(red: int, green: int, blue: int, width: int = 8, height: int = 6) -> np.ndarray:
    """uint8[height, width, 3] of one colour."""
    return np.full((height, width, 3), (red, green, blue), np.uint8)


def image_message(pixels: np.ndarray, encoding: str = "rgb8", **changes: Any) -> Image:
    """An Image of these pixels; `changes` overwrite fields."""
    height, width = pixels.shape[:2]
    message = Image(height=height, width=width, encoding=encoding, step=pixels.strides[0])
    message.data = array.array("B", np.ascontiguousarray(pixels).tobytes())
    for name, value in changes.items():
        setattr(message, name, value)
    return message


@dataclass
class Sensor:
    """One topic. Fields may change while the robot runs."""

    publisher: Publisher
    message: Any
    stamp_offset: float = 0.0
    stamp: Time | None = None
    on: bool = True


@dataclass
class Robot:
    """Publishes every sensor at `rate` Hz. `sensors` by view name and "joint_states"."""

    rig: Rig
    rate: float = 50.0
    sensors: dict[str, Sensor] = field(default_factory=dict)
    clock: Callable[[], int] | None = None

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.rig.at_end(self.stop)
        self._instruction = self.rig.node.create_publisher(String, "instruction", RELIABLE)

    def camera(self, view: str, message: Any, topic: str = "", qos: QoSProfile = BEST_EFFORT) -> Robot:
        """Add a camera."""
        publisher = self.rig.node.create_publisher(type(message), topic or f"{view}/image_raw", qos)
        self.sensors[view] = Sensor(publisher, message)
        return self

    def joints(self, positions: Mapping[str, float] = POSITIONS, qos: QoSProfile = BEST_EFFORT) -> Robot:
        """Add the joint states."""
        publisher = self.rig.node.create_publisher(JointState, "joint_states", qos)
        self.sensors["joint_states"] = Sensor(publisher, joint_message(positions))
        return self

    def start(self) -> Robot:
        """Begin to publish."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop to publish."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(5)

    @property
    def listeners(self) -> int:
        """Who listens for instructions."""
        return int(self._instruction.get_subscription_count())

    def tell(self, instruction: str, listeners: int = 1) -> None:
        """Publish an instruction, once somebody listens."""
        wait_until(lambda: self.listeners >= listeners, "a listener for instructions")
        self._instruction.publish(String(data=instruction))

    def _run(self) -> None:
        start, tick = time.monotonic(), 0
        while not self._stop.is_set():
            for sensor in list(self.sensors.values()):
                if sensor.on:
                    sensor.message.header.stamp = sensor.stamp or self._now(sensor.stamp_offset)
                    sensor.publisher.publish(sensor.message)
            tick += 1
            self._stop.wait(max(0.0, start + tick / self.rate - time.monotonic()))

    def _now(self, offset: float) -> Time:
        now_ns = self.clock() if self.clock else time.time_ns()
        seconds, rest = divmod(now_ns + round(offset * 1e9), 1_000_000_000)
        return Time(sec=seconds, nanosec=rest)


def joint_message(positions: Mapping[str, float]) -> JointState:
    """A JointState with these positions."""
    return JointState(name=list(positions), position=array.array("d", positions.values()))


def default_robot(rig: Rig, rate: float = 50.0) -> Robot:
    """Two cameras, red and green, and three joints; not started."""
    robot = Robot(rig, rate)
    robot.camera("front", image_message(solid(200, 10, 20)))
    robot.camera("wrist", image_message(solid(30, 220, 40)))
    return robot.joints()
