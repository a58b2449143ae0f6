"""A camera process: a photograph or a test card, filmed by a wandering crop, as sensor_msgs/Image.

Run: `python -m flashrt_ros.node.demo.camera front` (a view of `scene.CAMERAS`).
"""

from __future__ import annotations

import argparse
import array
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
from rclpy.node import Node
from rclpy.qos import qos_profile_sensor_data
from sensor_msgs.msg import Image

from .errors import DemoError
from .photographs import MovingCrop, Pixels, colour_card, enlarged, load_photograph
from .publishing import keep_pace, publishing_node
from .scene import CAMERA_RATE, CAMERAS, HEIGHT, WIDTH, Camera


def scenery(camera: Camera, *, card: bool) -> Pixels:
    """uint8[height, width, 3]: what `camera` films, larger than a frame, in the channel order that it publishes."""
    if card:
        picture = colour_card(WIDTH * 4 // 3, HEIGHT * 4 // 3)
    else:
        picture = enlarged(load_photograph(camera.photograph), WIDTH, HEIGHT)
    return np.ascontiguousarray(picture[:, :, ::-1]) if camera.encoding == "bgr8" else picture


def make_publish(node: Node, camera: Camera, picture: Pixels) -> Callable[[float], None]:
    """A function that publishes the frame of a time (seconds since start)."""
    crop = MovingCrop(picture, WIDTH, HEIGHT)
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
    parser.add_argument("--card", action="store_true", help="a test card instead of a photograph")
    parser.add_argument("--triggered", action="store_true", help="start at a whole period of the system clock")
    args, _ = parser.parse_known_args(argv)
    camera = next(camera for camera in CAMERAS if camera.view == args.view)
    try:
        picture = scenery(camera, card=args.card)
        with publishing_node(f"{camera.view}_camera") as (node, stop):
            if args.triggered:
                stop.wait(-time.time() % (1.0 / args.rate))
            keep_pace(args.rate, stop, make_publish(node, camera, picture))
    except DemoError as error:
        print(f"camera '{camera.view}': {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
