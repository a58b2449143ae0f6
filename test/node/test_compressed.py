"""JPEG and PNG messages: decoded whole, or refused with a reason; never half a picture."""

from __future__ import annotations

import struct
import zlib
from array import array
from functools import cache

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from rclpy.serialization import serialize_message
from sensor_msgs.msg import CompressedImage
from skimage import data as photographs

from flashrt_ros.node.cdr import CompressedImageMessage, Header, parse_compressed_image
from flashrt_ros.node.images import Frame, ImageError, decode_compressed, image_to_frame
from flashrt_ros.policies.pixels import PixelOrder


def received(format_text: str, content: bytes) -> Frame:
    message = CompressedImage(format=format_text, data=array("B", content))
    return image_to_frame(parse_compressed_image(serialize_message(message)))


@cache
def photograph() -> NDArray[np.uint8]:
    """BGR uint8[120, 152, 3], a real photograph; neither side is a multiple of 16."""
    picture: NDArray[np.uint8] = photographs.astronaut()  # type: ignore[no-untyped-call]
    return np.ascontiguousarray(picture[40:160, 150:302, ::-1])


def encode(extension: str, pixels: NDArray[np.unsignedinteger], *settings_: int) -> bytes:
    ok, content = cv2.imencode(extension, pixels, list(settings_))
    assert ok
    return content.tobytes()


@cache
def jpeg() -> bytes:
    return encode(".jpg", photograph())


@cache
def png() -> bytes:
    return encode(".png", photograph())


def scan_start(content: bytes) -> int:
    """Where the entropy-coded data of a JPEG begin."""
    mark = content.index(b"\xff\xda")
    return mark + 2 + int.from_bytes(content[mark + 2 : mark + 4], "big")


# What image_transport writes for each kind of camera, and what drivers write that do not use it.
@pytest.mark.parametrize(
    "format_text",
    ["jpeg", "jpg", "JPEG", "rgb8; jpeg compressed bgr8", "bgr8; jpeg compressed bgr8", "bgra8; jpeg compressed bgr8",
     "yuv422; jpeg compressed bgr8"],
)  # fmt: skip
def test_a_colour_jpeg_is_decoded_as_bgr(format_text: str) -> None:
    frame = received(format_text, jpeg())
    assert frame.order is PixelOrder.BGR
    assert frame.pixels.shape == photograph().shape
    assert np.abs(frame.pixels.astype(int) - photograph()).mean() < 4


@pytest.mark.parametrize("format_text", ["png", "rgb8; png compressed bgr8"])
def test_a_colour_png_gives_the_very_pixels(format_text: str) -> None:
    frame = received(format_text, png())
    assert frame.order is PixelOrder.BGR
    np.testing.assert_array_equal(frame.pixels, photograph())


def test_a_png_with_alpha_keeps_four_channels() -> None:
    pixels = np.dstack((photograph(), photograph()[:, :, 0]))
    frame = received("rgba8; png compressed bgr8", encode(".png", pixels))
    assert frame.order is PixelOrder.BGR
    np.testing.assert_array_equal(frame.pixels, pixels)


def test_pixels_that_were_compressed_as_rgb_are_labelled_rgb() -> None:
    frame = received("rgb8; png compressed rgb8", png())
    assert frame.order is PixelOrder.RGB
    np.testing.assert_array_equal(frame.pixels, photograph())


@pytest.mark.parametrize("format_text", ["png", "mono8; png compressed ", "mono8; png compressed mono8"])
def test_a_grey_picture_stays_grey(format_text: str) -> None:
    grey = np.ascontiguousarray(photograph()[:, :, 1])
    frame = received(format_text, encode(".png", grey))
    assert frame.order is PixelOrder.MONO
    np.testing.assert_array_equal(frame.pixels, grey[:, :, np.newaxis])


def test_a_bayer_picture_in_a_jpeg_is_decoded_to_its_colours() -> None:
    pattern = np.tile(np.array([[200, 100], [100, 50]], np.uint8), (24, 32))
    frame = received("bayer_rggb8; jpeg compressed ", encode(".jpg", pattern, cv2.IMWRITE_JPEG_QUALITY, 100))
    assert frame.order is PixelOrder.RGB
    assert frame.pixels.shape == (48, 64, 3)
    assert np.abs(frame.pixels.astype(int) - (200, 100, 50)).max() <= 3


def test_a_bayer_picture_in_a_png_gives_the_colours_of_the_raw_message() -> None:
    pattern = np.ascontiguousarray(photograph()[:, :, 1])
    frame = received("bayer_grbg8; png compressed ", encode(".png", pattern))
    np.testing.assert_array_equal(frame.pixels, cv2.cvtColor(pattern, cv2.COLOR_BayerGB2RGB))


@pytest.mark.parametrize(
    ("format_text", "words"),
    [
        ("", "format '' is refused; supported: 'jpeg', 'png'"),
        ("webp", "'webp' is refused"),
        ("16UC1; compressedDepth png", "'16UC1; compressedDepth png' is refused"),
        ("rgb8; tiff compressed bgr8", "refused; supported"),
        ("rgb16; jpeg compressed bgr8", "encoding 'rgb16' is refused"),
        ("mono16; png compressed ", "encoding 'mono16' is refused"),
        ("rgb8; jpeg compressed bgr16", "layout 'bgr16' is none of"),
        ("rgb8; jpeg compressed ", "names no colour layout, but the picture has 3 channels"),
        ("mono8; jpeg compressed ", "names no colour layout, but the picture has 3 channels"),
        ("png", "announces png, but the data start with ff d8 ff e0"),
    ],
)
def test_a_format_that_cannot_be_trusted_is_refused_by_name(format_text: str, words: str) -> None:
    with pytest.raises(ImageError, match=words):
        received(format_text, jpeg())


def test_a_grey_picture_that_is_announced_as_colour_is_refused() -> None:
    with pytest.raises(ImageError, match="announces colour, but the picture has one channel"):
        received("rgb8; png compressed bgr8", encode(".png", photograph()[:, :, 0].copy()))


def test_data_that_are_empty_are_refused() -> None:
    with pytest.raises(ImageError, match="start with nothing"):
        received("jpeg", b"")


def test_a_png_of_16_bits_is_refused() -> None:
    deep = encode(".png", photograph()[:, :, 0].astype(np.uint16) * 257)
    with pytest.raises(ImageError, match="16 bits"):
        received("png", deep)


@pytest.mark.parametrize("format_text", ["jpeg", "png"])
def test_a_picture_larger_than_its_window_is_refused_before_it_is_decoded(format_text: str) -> None:
    content = jpeg() if format_text == "jpeg" else png()
    needed = photograph().size
    message = CompressedImageMessage(Header(1, ""), format_text, memoryview(content))
    assert decode_compressed(message, needed).pixels.size == needed
    # The data are cut, so whoever decodes first reports something else.
    with pytest.raises(ImageError, match=f"152x120 with 3 channels needs {needed} bytes.*holds {needed - 1}"):
        decode_compressed(message, needed - 1)


@given(cut=st.floats(0, 1, exclude_max=True))
def test_a_jpeg_that_is_cut_off_anywhere_is_refused(cut: float) -> None:
    with pytest.raises(ImageError):
        received("jpeg", jpeg()[: int(cut * len(jpeg()))])


@given(cut=st.floats(0, 1, exclude_max=True))
def test_a_png_that_is_cut_off_anywhere_is_refused(cut: float) -> None:
    with pytest.raises(ImageError):
        received("png", png()[: int(cut * len(png()))])


@pytest.mark.parametrize(
    ("length", "words"),
    [
        (3, "truncated JPEG: 3 bytes end before the picture's data begin"),
        (30, "truncated JPEG: the segment at byte 20 reaches past the end"),
        (3000, "truncated JPEG: 3000 bytes and no end mark"),
    ],
)
def test_a_truncated_jpeg_is_refused_as_truncated(length: int, words: str) -> None:
    with pytest.raises(ImageError, match=words):
        received("rgb8; jpeg compressed bgr8", jpeg()[:length])


@pytest.mark.parametrize(
    ("length", "words"),
    [
        (8, "truncated PNG: 8 bytes and no end chunk"),
        (20, "truncated PNG: the chunk at byte 8 reaches past the end"),
        (-12, "truncated PNG: .* no end chunk"),
        (-1, "truncated PNG: .* no end chunk"),
    ],
)
def test_a_truncated_png_is_refused_as_truncated(length: int, words: str) -> None:
    with pytest.raises(ImageError, match=words):
        received("png", png()[:length])


@given(share=st.floats(0.02, 0.85))
def test_a_jpeg_whose_data_are_short_is_refused_in_spite_of_its_end_mark(share: float) -> None:
    start = scan_start(jpeg())
    short = jpeg()[: start + int(share * (len(jpeg()) - start))].rstrip(b"\xff") + b"\xff\xd9"
    with pytest.raises(ImageError, match="incomplete JPEG"):
        received("jpeg", short)


@pytest.mark.parametrize("lost", [512, 2048])
def test_a_jpeg_that_lost_a_packet_in_the_middle_is_refused(lost: int) -> None:
    middle = (scan_start(jpeg()) + len(jpeg())) // 2
    with pytest.raises(ImageError, match="incomplete JPEG"):
        received("jpeg", jpeg()[:middle] + jpeg()[middle + lost :])


def test_a_jpeg_that_lost_a_packet_between_restart_marks_is_refused() -> None:
    content = encode(".jpg", photograph(), cv2.IMWRITE_JPEG_RST_INTERVAL, 4)
    received("jpeg", content)
    first, third = content.index(b"\xff\xd1"), content.index(b"\xff\xd3")
    with pytest.raises(ImageError, match=r"incomplete JPEG: \d+ of \d+ restart marks, out of order"):
        received("jpeg", content[:first] + content[third:])


def test_a_jpeg_whose_restart_marks_are_out_of_order_is_refused() -> None:
    content = encode(".jpg", photograph(), cv2.IMWRITE_JPEG_RST_INTERVAL, 4)
    swapped = (
        content.replace(b"\xff\xd1", b"\xff\xd8").replace(b"\xff\xd2", b"\xff\xd1").replace(b"\xff\xd8", b"\xff\xd2")
    )
    with pytest.raises(ImageError, match=r"restart marks, out of order"):
        received("jpeg", content[:2] + swapped[2:])


def test_a_jpeg_that_lost_its_last_restart_interval_is_refused() -> None:
    content = encode(".jpg", photograph(), cv2.IMWRITE_JPEG_RST_INTERVAL, 4)
    marks = [content.rindex(bytes((0xFF, mark))) for mark in range(0xD0, 0xD8)]
    with pytest.raises(ImageError, match=r"incomplete JPEG: \d+ of \d+ restart marks$"):
        received("jpeg", content[: max(marks)] + b"\xff\xd9")


@pytest.mark.parametrize("shape", [(64, 64, 3), (61, 53, 3), (64, 64), (8, 8, 3), (1, 1, 3), (17, 33, 3)])
def test_a_jpeg_that_really_is_grey_is_decoded(shape: tuple[int, ...]) -> None:
    frame = received("jpeg", encode(".jpg", np.full(shape, 128, np.uint8)))
    assert (frame.pixels == 128).all()


def test_a_photograph_with_a_grey_corner_is_decoded() -> None:
    pixels = photograph().copy()
    pixels[-40:, -40:] = 128
    frame = received("jpeg", encode(".jpg", pixels))
    assert (frame.pixels[-8:, -8:] == 128).all()
    assert np.abs(frame.pixels.astype(int) - pixels).mean() < 4


def test_zeros_after_the_end_mark_are_allowed_as_usb_cameras_send_them() -> None:
    np.testing.assert_array_equal(received("jpeg", jpeg() + bytes(100)).pixels, received("jpeg", jpeg()).pixels)


def test_a_progressive_jpeg_is_refused_by_name() -> None:
    with pytest.raises(ImageError, match="a progressive JPEG is refused; publish baseline"):
        received("jpeg", encode(".jpg", photograph(), cv2.IMWRITE_JPEG_PROGRESSIVE, 1))


def test_the_orientation_tag_of_a_jpeg_does_not_turn_the_picture() -> None:
    tiff = b"II*\0\x08\0\0\0\x01\0" + struct.pack("<HHIHH", 0x0112, 3, 1, 6, 0) + bytes(4)
    exif = b"Exif\0\0" + tiff
    segment = b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif
    turned = jpeg()[:2] + segment + jpeg()[2:]
    obeyed = cv2.imdecode(np.frombuffer(turned, np.uint8), cv2.IMREAD_COLOR)
    assert obeyed is not None
    assert obeyed.shape == (152, 120, 3)
    np.testing.assert_array_equal(received("jpeg", turned).pixels, received("jpeg", jpeg()).pixels)


def test_a_png_with_a_flipped_bit_is_refused() -> None:
    damaged = bytearray(png())
    damaged[len(damaged) // 2] ^= 1
    with pytest.raises(ImageError, match="damaged PNG: wrong checksum"):
        received("png", bytes(damaged))


def test_a_png_whose_rows_are_missing_is_refused_in_spite_of_its_checksums() -> None:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 64, 64, 8, 2, 0, 0, 0))
    half = zlib.compress(bytes(32 * (1 + 3 * 64)))
    with pytest.raises(ImageError, match="damaged png data"):
        received("png", b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", half) + chunk(b"IEND", b""))


@settings(max_examples=300)
@given(
    codec=st.sampled_from(("jpeg", "png")),
    changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=6),
    head=st.booleans(),
)
def test_damaged_pictures_give_a_frame_or_an_image_error(
    codec: str, changes: list[tuple[int, int]], head: bool
) -> None:
    content = bytearray(jpeg() if codec == "jpeg" else png())
    span = 640 if head else len(content)
    for position, value in changes:
        content[position % span] = value
    decode_or_refuse(codec, bytes(content))


@given(codec=st.sampled_from(("jpeg", "png")), content=st.binary(max_size=200), magic=st.booleans())
def test_any_bytes_give_a_frame_or_an_image_error(codec: str, content: bytes, magic: bool) -> None:
    start = {"jpeg": b"\xff\xd8\xff", "png": b"\x89PNG\r\n\x1a\n"}[codec]
    decode_or_refuse(codec, (start if magic else b"") + content)


def decode_or_refuse(codec: str, content: bytes) -> None:
    message = CompressedImageMessage(Header(1, ""), codec, memoryview(content))
    try:
        frame = decode_compressed(message, capacity=1 << 20)
    except ImageError:
        return
    assert frame.pixels.dtype == np.uint8
    assert frame.pixels.size <= 1 << 20
