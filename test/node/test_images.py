"""Camera messages as frames. Every message here went through the serialiser that rclpy uses."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from numpy.typing import NDArray
from rclpy.serialization import serialize_message
from sensor_msgs.msg import Image

from flashrt_ros.node.cdr import ImageMessage, parse_image
from flashrt_ros.node.images import ENCODINGS, ImageError, image_to_frame
from flashrt_ros.policies.pixels import CHANNELS, PixelOrder, copy_pixels

DIRECT = {
    "rgb8": (3, PixelOrder.RGB),
    "bgr8": (3, PixelOrder.BGR),
    "rgba8": (4, PixelOrder.RGB),
    "bgra8": (4, PixelOrder.BGR),
    "mono8": (1, PixelOrder.MONO),
    "8UC1": (1, PixelOrder.MONO),
}
REFUSED = ("mono16", "rgb16", "bgra16", "16UC1", "32FC1", "64FC3", "8UC2", "8UC3", "8UC4", "8SC1", "nv21", "nv24",
           "bayer_rggb16", "RGB8", "rgb8 ", "", "jpeg", "yuv444")  # fmt: skip


def received(encoding: str, rows: NDArray[np.uint8], width: int, big_endian: int = 0, step: int = -1) -> ImageMessage:
    """An image as it arrives. `rows` is uint8[height, bytes], padding included."""
    message = Image(encoding=encoding, height=rows.shape[0], width=width, is_bigendian=big_endian)
    message.step = rows.shape[1] if step < 0 else step
    message.data = array("B", rows.tobytes())
    return parse_image(serialize_message(message))


def random_pixels(height: int, width: int, channels: int) -> NDArray[np.uint8]:
    return np.random.default_rng(7).integers(0, 256, (height, width, channels), np.uint8)


def padded(pixels: NDArray[np.uint8], step: int) -> NDArray[np.uint8]:
    """The same rows, each followed by noise up to `step` bytes."""
    rows = random_pixels(pixels.shape[0], step, 1)[:, :, 0]
    rows[:, : pixels[0].size] = pixels.reshape(pixels.shape[0], -1)
    return rows


@pytest.mark.parametrize("encoding", DIRECT)
@pytest.mark.parametrize("padding", [0, 1, 16])
def test_a_direct_encoding_gives_its_pixels_and_their_order(encoding: str, padding: int) -> None:
    channels, order = DIRECT[encoding]
    pixels = random_pixels(4, 5, channels)
    frame = image_to_frame(received(encoding, padded(pixels, 5 * channels + padding), 5))
    assert frame.order is order
    assert channels in CHANNELS[order]
    np.testing.assert_array_equal(frame.pixels, pixels)


def test_padded_rows_give_the_pixels_of_the_unpadded_image() -> None:
    pixels = random_pixels(4, 5, 3)
    with_padding = image_to_frame(received("rgb8", padded(pixels, 16), 5))
    without = image_to_frame(received("rgb8", pixels.reshape(4, 15), 5))
    np.testing.assert_array_equal(with_padding.pixels, without.pixels)
    window = np.full(100, 255, np.uint8)
    assert copy_pixels(window, with_padding.pixels) == 60
    np.testing.assert_array_equal(window[:60], pixels.ravel())
    assert (window[60:] == 255).all()


@pytest.mark.parametrize("encoding", DIRECT)
def test_a_direct_encoding_is_not_copied(encoding: str) -> None:
    message = received(encoding, random_pixels(4, 20, 1)[:, :, 0], 5)
    frame = image_to_frame(message)
    assert np.shares_memory(frame.pixels, np.frombuffer(message.data, np.uint8))
    assert not frame.pixels.flags.writeable


@pytest.mark.parametrize("encoding", DIRECT)
def test_the_byte_order_flag_is_ignored_where_a_channel_is_one_byte(encoding: str) -> None:
    rows = random_pixels(4, 20, 1)[:, :, 0]
    little, big = (image_to_frame(received(encoding, rows, 5, flag)) for flag in (0, 1))
    np.testing.assert_array_equal(little.pixels, big.pixels)


@pytest.mark.parametrize("encoding", REFUSED)
@pytest.mark.parametrize("big_endian", [0, 1])
def test_any_other_encoding_is_refused_by_name_with_the_supported_ones(encoding: str, big_endian: int) -> None:
    with pytest.raises(ImageError) as caught:
        image_to_frame(received(encoding, random_pixels(4, 40, 1)[:, :, 0], 5, big_endian))
    assert f"'{encoding}'" in str(caught.value)
    for supported in ENCODINGS:
        assert supported in str(caught.value)


@pytest.mark.parametrize("encoding", ["8UC3", "8UC4"])
def test_an_ambiguous_encoding_is_refused_with_the_unambiguous_ones(encoding: str) -> None:
    with pytest.raises(ImageError, match=r"publish rgb.*or bgr"):
        image_to_frame(received(encoding, random_pixels(4, 20, 1)[:, :, 0], 5))


@pytest.mark.parametrize(
    ("height", "size", "width", "step", "words"),
    [
        (4, 15, 5, 16, "height x step is 4 x 16 = 64 bytes, but data has 60"),
        (4, 16, 5, 15, "height x step is 4 x 15 = 60 bytes, but data has 64"),
        (4, 15, 5, 0, "step is 0 bytes, but a row of 5 pixels in rgb8 takes 15"),
        (4, 15, 5, 14, "step is 14 bytes, but a row of 5 pixels in rgb8 takes 15"),
        (4, 15, 2**31, 15, "a row of 2147483648 pixels"),
        (0, 0, 0, 0, "0x0 pixels"),
        (4, 15, 0, 15, "0x4 pixels"),
        (0, 0, 5, 15, "5x0 pixels"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(
    height: int, size: int, width: int, step: int, words: str
) -> None:
    with pytest.raises(ImageError, match=words):
        image_to_frame(received("rgb8", random_pixels(height, size, 1)[:, :, 0], width, step=step))


def test_bgr_is_handed_on_as_bgr_and_never_relabelled() -> None:
    red = np.zeros((2, 2, 3), np.uint8)
    red[:, :, 2] = 255
    frame = image_to_frame(received("bgr8", red.reshape(2, 6), 2))
    assert frame.order is PixelOrder.BGR
    assert frame.pixels[0, 0].tolist() == [0, 0, 255]


def test_a_frame_fills_a_window_of_its_size_exactly() -> None:
    pixels = random_pixels(3, 4, 3)
    window = np.zeros(36, np.uint8)
    assert copy_pixels(window, pixels) == 36
    np.testing.assert_array_equal(window, pixels.ravel())
