"""A camera process: a photograph, filmed by a wandering crop, as sensor_msgs/Image.

Run: `python -m flashrt_ros.node.demo.camera front` (a view of `scene.CAMERAS`).
"""

from __future__ import annotations

import argparse
import array
import sys
from collections.abc import Callable, Sequence

import numpy as np
from rclpy.node import Node
from rclpy.qos import qos_profile_sensor_data
from sensor_msgs.msg import Image

from .errors import DemoError
from .photographs import MovingCrop, load_photograph
from .publishing import keep_pace, publishing_node
from .scene import CAMERA_RATE, CAMERAS, HEIGHT, WIDTH, Camera


def make_publish(node: Node, camera: Camera) -> Callable[[float], None]:
    """A function that publishes the frame of a time (seconds since start)."""
    order = slice(None, None, -1) if camera.encoding == "bgr8" else slice(None)
    # Reordered once here: a camera process must leave the two cores to the policy.
    crop = MovingCrop(np.ascontiguousarray(load_photograph(camera.photograph)[:, :, order]), WIDTH, HEIGHT)
    publisher = node.create_publisher(Image, camera.topic, qos_profile_sensor_data)
    message = Image(width=WIDTH, height=HEIGHT, encoding=camera.encoding, step=3 * WIDTH)
    message.header.frame_id = f"{camera.view}_camera"
    # One array.array for all frames. Assigning bytes or a numpy array converts pixel by pixel: 118 ms a frame.
    message.data = array.array("B", bytes(HEIGHT * WIDTH * 3))
    pixels = np.frombuffer(message.data, np.uint8).reshape(HEIGHT, WIDTH, 3)

    def publish(seconds: float) -> None:
        message.header.stamp = node.get_clock().now().to_msg()
        np.copyto(pixels, crop.at(seconds))
        publisher.publish(message)

    return publish


def main(argv: Sequence[str] | None = None) -> int:
    """Film until SIGINT or SIGTERM; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("view", choices=[camera.view for camera in CAMERAS])
    parser.add_argument("--rate", type=float, default=CAMERA_RATE, help="frames a second (Hz)")
    args, _ = parser.parse_known_args(argv)
    camera = next(camera for camera in CAMERAS if camera.view == args.view)
    try:
        with publishing_node(f"{camera.view}_camera") as (node, stop):
            keep_pace(args.rate, stop, make_publish(node, camera))
    except DemoError as error:
        print(f"camera '{camera.view}': {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
