"""The rows of "Inputs that have broken other people's nodes" about camera messages, from the topic to the chunk.

The probe policy publishes the mean colour that it saw; `test_images` and its neighbours have all encodings.
"""

from __future__ import annotations

import array
from typing import Any

import cv2
import numpy as np
import pytest
from sensor_msgs.msg import CompressedImage, Image

from flashrt_ros.msg import ActionChunk, Refusal, StreamStatus
from test.node.rig import Rig, record_chunks, record_status
from test.node.robot import Robot, image_message, solid
from test.node.test_table_streams import causes_of, stream_of

RED = (200, 10, 60)
SEES_FRONT: dict[str, Any] = {
    "policy.views": ["front"],
    "policy.action_names": ["front_0", "front_1", "front_2"],
    "policy.max_pixels": 320 * 240,
}


def colours(chunk: ActionChunk) -> list[float]:
    """Mean red, green and blue that the policy saw."""
    return [round(float(value), 3) for value in chunk.data[:3]]


def padded(width: int = 5, height: int = 4, step: int = 16) -> Image:
    """Red rgb8 whose rows end in padding of another colour."""
    rows = np.full((height, step), 99, np.uint8)
    rows[:, : width * 3] = np.tile(np.array(RED, np.uint8), width)
    return Image(height=height, width=width, encoding="rgb8", step=step, data=array.array("B", rows.tobytes()))


def jpeg(picture_format: str = "jpeg", keep: float = 1.0) -> CompressedImage:
    """A red JPEG, of which only the share `keep` of the bytes is left."""
    bgr = np.full((48, 64, 3), RED[::-1], np.uint8)
    data = cv2.imencode(".jpg", bgr)[1].tobytes()
    return CompressedImage(format=picture_format, data=array.array("B", data[: int(len(data) * keep)]))


def bayer_jpeg() -> CompressedImage:
    """A grey-level JPEG that the format declares to be a Bayer pattern, all of one value."""
    data = cv2.imencode(".jpg", np.full((48, 64), 120, np.uint8))[1].tobytes()
    return CompressedImage(format="bayer_rggb8; jpeg compressed ", data=array.array("B", data))


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (image_message(solid(*RED)), RED),
        (padded(), RED),
        (image_message(solid(*RED[::-1]), "bgr8"), RED),
        (image_message(np.full((4, 4, 4), (*RED, 7), np.uint8), "rgba8"), RED),
        (image_message(np.full((4, 4, 4), (*RED[::-1], 7), np.uint8), "bgra8"), RED),
        (image_message(np.full((4, 4, 1), 50, np.uint8), "mono8"), (50, 50, 50)),
        (image_message(solid(*RED), is_bigendian=1), RED),
        (image_message(np.full((4, 4, 2), 128, np.uint8), "yuv422_yuy2"), (130, 130, 130)),
        (image_message(np.full((4, 4, 1), 70, np.uint8), "bayer_rggb8"), (70, 70, 70)),
    ],
    ids=["rgb8", "padded_rows", "bgr8", "rgba8", "bgra8", "mono8", "bigendian_flag", "yuv422_yuy2", "bayer"],
)
def test_the_policy_sees_the_right_colours(rig: Rig, message: Image, expected: tuple[int, int, int]) -> None:
    Robot(rig).camera("front", message).joints().start()
    chunks = record_chunks(rig)
    rig.active_policy(SEES_FRONT)
    assert np.allclose(colours(chunks.next()[0]), expected, atol=1.0)


@pytest.mark.parametrize(
    ("message", "expected"),
    [(jpeg(), RED), (jpeg("rgb8; jpeg compressed bgr8"), RED), (bayer_jpeg(), (120, 120, 120))],
    ids=["jpeg", "transport_format", "bayer_jpeg"],
)
def test_compressed_images_are_decoded(rig: Rig, message: CompressedImage, expected: tuple[int, int, int]) -> None:
    Robot(rig).camera("front", message, "front/image_raw/compressed").joints().start()
    chunks = record_chunks(rig)
    rig.active_policy({**SEES_FRONT, "views.front.compressed": True})
    assert np.allclose(colours(chunks.next()[0]), expected, atol=4.0)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (image_message(solid(*RED), height=7), "height x step"),
        (image_message(solid(*RED), step=0), "step is 0"),
        (Image(encoding="rgb8"), "0x0"),
        (image_message(np.zeros((4, 4, 2), np.uint8), "16UC1"), "16UC1"),
        (image_message(np.zeros((4, 4, 2), np.uint8), "mono16", is_bigendian=1), "mono16"),
        (image_message(np.zeros((400, 400, 3), np.uint8)), "400x400"),
    ],
    ids=["height_times_step", "step_zero", "empty", "depth", "bigendian_16_bit", "too_large"],
)
def test_a_bad_image_is_refused_with_a_reason_and_the_node_lives(rig: Rig, message: Image, words: str) -> None:
    robot = Robot(rig).camera("front", message).joints().start()
    chunks, statuses = record_chunks(rig), record_status(rig)
    rig.active_policy(SEES_FRONT)
    refused = statuses.wait_for(lambda m: Refusal.BAD_IMAGE in causes_of(stream_of(m, "front")), "the image is refused")
    front = stream_of(refused, "front")
    assert words in front.reason
    assert "/front/image_raw" in front.reason
    assert front.state == StreamStatus.REFUSED
    assert not len(chunks)
    robot.sensors["front"].message = image_message(solid(*RED))
    assert chunks.next()


def test_a_truncated_jpeg_is_refused_and_never_half_an_image(rig: Rig) -> None:
    robot = Robot(rig).camera("front", jpeg(keep=0.6), "front/image_raw/compressed").joints().start()
    chunks, statuses = record_chunks(rig), record_status(rig)
    rig.active_policy({**SEES_FRONT, "views.front.compressed": True})
    statuses.wait_for(lambda m: Refusal.BAD_IMAGE in causes_of(stream_of(m, "front")), "the JPEG is refused")
    assert not len(chunks)
    robot.sensors["front"].message = jpeg()
    assert chunks.next()
