"""A robot process: an arm that swings on its own, as sensor_msgs/JointState.

It does not follow the chunks: the weights of the policy that the demo runs are seeded, not trained, so its actions
are as good as any others but mean nothing.

Run: `python -m flashrt_ros.node.demo.robot`.
"""

from __future__ import annotations

import argparse
import array
import sys
from collections.abc import Sequence

from rclpy.qos import qos_profile_sensor_data
from sensor_msgs.msg import JointState

from .publishing import keep_pace, publishing_node
from .scene import JOINT_RATE, JOINTS


def main(argv: Sequence[str] | None = None) -> int:
    """Swing until SIGINT or SIGTERM; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=JOINT_RATE, help="joint states a second (Hz)")
    args, _ = parser.parse_known_args(argv)
    with publishing_node("robot") as (node, stop):
        publisher = node.create_publisher(JointState, "/joint_states", qos_profile_sensor_data)
        message = JointState(name=[joint.name for joint in JOINTS])

        def publish(seconds: float) -> None:
            motion = [joint.at(seconds) for joint in JOINTS]
            message.header.stamp = node.get_clock().now().to_msg()
            message.position = array.array("d", [position for position, _ in motion])
            message.velocity = array.array("d", [velocity for _, velocity in motion])
            publisher.publish(message)

        keep_pace(args.rate, stop, publish)
    return 0


if __name__ == "__main__":
    sys.exit(main())
