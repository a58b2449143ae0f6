"""What the demo shows: two cameras, an arm that moves on its own, and two instructions. Imports no ROS."""

from __future__ import annotations

import math
from dataclasses import dataclass

WIDTH, HEIGHT = 640, 480  # pixels of a camera frame
CAMERA_RATE = 30.0  # Hz
JOINT_RATE = 100.0  # Hz

INSTRUCTIONS = ("pick up the coffee cup", "stroke the cat")


@dataclass(frozen=True)
class Camera:
    """A camera: the policy's name for it, the topic, the photograph it films and the encoding it publishes."""

    view: str
    topic: str
    photograph: str
    encoding: str


# Both channel orders, because both are common, and the policy must see the same colours.
CAMERAS = (
    Camera("front", "/front/image_raw", "coffee.png", "rgb8"),
    Camera("wrist", "/wrist/image_raw", "chelsea.png", "bgr8"),
)


@dataclass(frozen=True)
class Joint:
    """A joint that swings around `centre` by `swing` (radians or metres), `period` seconds a cycle."""

    name: str
    centre: float
    swing: float
    period: float

    def at(self, seconds: float) -> tuple[float, float]:
        """Position and velocity at a time since start."""
        rate = 2.0 * math.pi / self.period
        return (
            self.centre + self.swing * math.sin(rate * seconds),
            self.swing * rate * math.cos(rate * seconds),
        )


# A Franka arm around its ready pose, well within its limits. The periods share no divisor, so that nothing repeats.
JOINTS = (
    Joint("panda_joint1", 0.0, 0.45, 11.0),
    Joint("panda_joint2", -0.785, 0.30, 7.0),
    Joint("panda_joint3", 0.0, 0.35, 13.0),
    Joint("panda_joint4", -2.1, 0.30, 9.0),
    Joint("panda_joint5", 0.0, 0.40, 8.0),
    Joint("panda_joint6", 1.9, 0.35, 10.0),
    Joint("panda_joint7", 0.785, 0.50, 6.0),
    Joint("panda_finger_joint1", 0.02, 0.012, 5.0),
)
