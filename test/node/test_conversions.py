"""Encodings that are converted: against known colours, against OpenCV, and with libraries that are broken or
absent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from rclpy.serialization import serialize_message
from sensor_msgs.msg import Image

from flashrt_ros.node.cdr import parse_image
from flashrt_ros.node.conversions import conversion_backend, convert, find_backend
from flashrt_ros.node.encodings import ENCODINGS
from flashrt_ros.node.images import Frame, ImageError, image_to_frame
from flashrt_ros.policies.pixels import PixelOrder

BAYER = {"bayer_rggb8": "rggb", "bayer_bggr8": "bggr", "bayer_gbrg8": "gbrg", "bayer_grbg8": "grbg"}
# Where Y, U, Y, V stand in two pixels of a row.
YUV = {"uyvy": (1, 0, 3, 2), "yuv422": (1, 0, 3, 2), "yuyv": (0, 1, 2, 3), "yuv422_yuy2": (0, 1, 2, 3)}
CONVERTED = [name for name, encoding in ENCODINGS.items() if encoding.conversion is not None]
ROOT = Path(__file__).parents[2]


def received(encoding: str, rows: NDArray[np.uint8], width: int) -> Frame:
    message = Image(encoding=encoding, height=rows.shape[0], width=width, step=rows.shape[1])
    message.data = array("B", rows.tobytes())
    return image_to_frame(parse_image(serialize_message(message)))


def mosaic(pattern: str, height: int, width: int, colour: tuple[int, int, int]) -> NDArray[np.uint8]:
    """What a sensor with this colour filter sees of a wall in one colour."""
    values = dict(zip("rgb", colour, strict=True))
    tile = np.array([values[letter] for letter in pattern], np.uint8).reshape(2, 2)
    return np.tile(tile, (height // 2, width // 2))


def test_the_tables_here_cover_every_converted_encoding() -> None:
    assert {*BAYER, *YUV} == set(CONVERTED)


@pytest.mark.parametrize("encoding", BAYER)
@pytest.mark.parametrize("padding", [0, 3])
def test_a_bayer_picture_of_one_colour_gives_that_colour(encoding: str, padding: int) -> None:
    rows = np.pad(mosaic(BAYER[encoding], 8, 12, (200, 100, 50)), ((0, 0), (0, padding)), constant_values=255)
    frame = received(encoding, rows, 12)
    assert frame.order is PixelOrder.RGB
    assert frame.pixels.shape == (8, 12, 3)
    assert (frame.pixels == (200, 100, 50)).all()


@pytest.mark.parametrize("encoding", YUV)
@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize(
    ("yuv", "rgb"),
    [((81, 90, 240), (255, 0, 0)), ((145, 54, 34), (0, 255, 0)), ((41, 240, 110), (0, 0, 255))],
)
def test_a_yuv_picture_of_one_colour_gives_that_colour(
    encoding: str, padding: int, yuv: tuple[int, int, int], rgb: tuple[int, int, int]
) -> None:
    group = np.zeros(4, np.uint8)
    group[list(YUV[encoding])] = (yuv[0], yuv[1], yuv[0], yuv[2])
    rows = np.pad(np.tile(group, (4, 3)), ((0, 0), (0, padding)), constant_values=255)
    frame = received(encoding, rows, 6)
    assert frame.order is PixelOrder.RGB
    assert frame.pixels.shape == (4, 6, 3)
    # BT.601 in studio range, rounded to whole numbers on both sides.
    assert np.abs(frame.pixels.astype(int) - rgb).max() <= 2


@pytest.mark.parametrize("encoding", YUV)
def test_a_yuv_picture_of_odd_width_is_refused(encoding: str) -> None:
    with pytest.raises(ImageError, match=f"'{encoding}' needs a width that is a multiple of 2, got 5"):
        received(encoding, np.zeros((4, 10), np.uint8), 5)


@pytest.mark.parametrize(("height", "width"), [(2, 8), (8, 2), (1, 1)])
def test_a_bayer_picture_too_small_to_interpolate_is_refused_and_not_black(height: int, width: int) -> None:
    with pytest.raises(ImageError, match="at least 3x3 pixels"):
        received("bayer_rggb8", np.full((height, width), 77, np.uint8), width)


def test_an_encoding_that_needs_no_conversion_is_not_converted() -> None:
    with pytest.raises(ImageError, match="'rgb8' needs no conversion"):
        convert(np.zeros((4, 4, 3), np.uint8), ENCODINGS["rgb8"])


def test_the_backend_has_a_name_and_says_why_it_is_not_cv_bridge() -> None:
    name, reason = conversion_backend()
    assert name in ("cv_bridge", "opencv")
    if name == "opencv":
        assert reason.startswith("cv_bridge")


@pytest.mark.parametrize("encoding", CONVERTED)
def test_cv_bridge_and_opencv_give_equal_pixels(encoding: str) -> None:
    pytest.importorskip("cv_bridge", reason="cv_bridge comes with ROS, not from PyPI")
    import cv2

    backend = find_backend()
    if encoding not in backend.bridged:
        pytest.skip(f"this cv_bridge does not convert it: {backend.reason}")
    code = ENCODINGS[encoding].conversion
    assert code is not None
    shape = (48, 64, 2) if encoding in YUV else (48, 64)
    pixels = np.random.default_rng(3).integers(0, 256, shape, np.uint8)
    expected = cv2.cvtColor(pixels, getattr(cv2, code.opencv_code))
    np.testing.assert_array_equal(convert(pixels, ENCODINGS[encoding]), expected)


REPORT = """
import json, numpy as np
from flashrt_ros.node.cdr import Header, ImageMessage
from flashrt_ros.node.images import conversion_backend, image_to_frame

def attempt(encoding, width):
    data = memoryview(bytes(range(64)))
    try:
        frame = image_to_frame(ImageMessage(Header(1, ""), 4, width, encoding, 0, 16, data))
        return frame.pixels.tolist()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

print(json.dumps({"backend": conversion_backend(), "bayer": attempt("bayer_rggb8", 16), "rgb8": attempt("rgb8", 5)}))
"""


def run_with_packages(directory: Path, files: dict[str, str]) -> Any:
    """What a fresh interpreter reports when these modules come before the installed ones."""
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(directory), str(ROOT)))}
    result = subprocess.run(
        [sys.executable, "-c", REPORT],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return json.loads(result.stdout.splitlines()[-1])


def expected_bayer() -> object:
    pixels = np.arange(64, dtype=np.uint8).reshape(4, 16)
    return convert(pixels, ENCODINGS["bayer_rggb8"]).tolist()


@pytest.mark.parametrize(
    "error",
    [
        "ImportError('numpy.core.multiarray failed to import')",
        "AttributeError('_ARRAY_API not found')",
        "SystemError('initialization of cv_bridge_boost raised unreported exception')",
    ],
)
def test_a_cv_bridge_that_fails_at_import_is_reported_and_not_fatal(tmp_path: Path, error: str) -> None:
    report = run_with_packages(tmp_path, {"cv_bridge/__init__.py": f"raise {error}\n"})
    name, reason = report["backend"]
    assert name == "opencv"
    assert reason.startswith("cv_bridge does not import")
    assert error.split("'")[1] in reason
    assert report["bayer"] == expected_bayer()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise RuntimeError('numpy 1 was expected')", "numpy 1 was expected"),
        ("import numpy; return numpy.zeros((8, 8, 3), numpy.uint8)", "other pixels than OpenCV"),
    ],
)
def test_a_cv_bridge_that_converts_wrongly_is_reported_and_not_used(tmp_path: Path, body: str, words: str) -> None:
    report = run_with_packages(
        tmp_path,
        {
            "cv_bridge/__init__.py": "",
            "cv_bridge/boost/__init__.py": "",
            "cv_bridge/boost/cv_bridge_boost.py": f"def cvtColor2(pixels, source, wanted):\n    {body}\n",
        },
    )
    name, reason = report["backend"]
    assert name == "opencv"
    assert "cv_bridge imports and converts nothing" in reason
    assert words in reason
    assert report["bayer"] == expected_bayer()


def test_without_any_library_direct_views_work_and_conversions_are_refused_with_the_remedy(
    tmp_path: Path,
) -> None:
    report = run_with_packages(tmp_path, {"cv2/__init__.py": "raise ImportError('libGL.so.1 is missing')\n"})
    assert report["backend"] == ["none", "cv2 does not import (ImportError: libGL.so.1 is missing)"]
    assert np.shape(report["rgb8"]) == (4, 5, 3)
    assert "ImageError: encoding 'bayer_rggb8' cannot be converted here" in str(report["bayer"])
    assert "libGL.so.1 is missing" in str(report["bayer"])
    assert "install opencv-python-headless" in str(report["bayer"])
