"""Photographs that ship with scikit-image, and a crop that wanders over one. Imports no ROS."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .errors import DemoError

Pixels = NDArray[np.uint8]

_MARGIN = 1.35  # the photograph is enlarged to this many times the frame, so that there is room to move
_PERIODS = (9.0, 7.0)  # seconds a horizontal and a vertical cycle


def load_photograph(name: str) -> Pixels:
    """uint8[height, width, 3] in RGB order of a file in scikit-image's data folder.

    The file is read by its path: importing scikit-image would cost each camera a second and 80 MB.

    Raises:
        DemoError: scikit-image is not installed, or has no such photograph.
    """
    import cv2  # only here and below: who shows a test card needs no OpenCV

    spec = importlib.util.find_spec("skimage")
    if spec is None or not spec.submodule_search_locations:
        raise DemoError(
            "the demo films photographs of scikit-image, which is not installed; "
            "run `make demo`, or `pip install 'flashrt_ros[demo]'`"
        )
    path = Path(spec.submodule_search_locations[0]) / "data" / name
    pixels = cv2.imread(str(path), cv2.IMREAD_COLOR)
    if pixels is None:
        raise DemoError(
            f"scikit-image has no readable photograph {path}; reinstall the pinned scikit-image with `make venv`"
        )
    return np.ascontiguousarray(pixels[:, :, ::-1], dtype=np.uint8)


def colour_card(width: int, height: int) -> Pixels:
    """uint8[height, width, 3]: a colour wheel with rings, the same for every call, for machines without photographs."""
    y, x = np.mgrid[-1.0 : 1.0 : height * 1j, -1.0 : 1.0 : width * 1j]
    angle, radius = np.arctan2(y, x), np.hypot(x, y)
    waves = [np.cos(angle + phase) * np.cos(24.0 * radius) for phase in (0.0, 2.1, 4.2)]
    return np.asarray(np.stack(waves, axis=-1) * 127.5 + 127.5, dtype=np.uint8)


class MovingCrop:
    """A window of fixed size that wanders smoothly over a larger picture.

    Args:
        picture: uint8[height, width, 3], at least as large as the window.
        width, height: pixels of the window.
    """

    def __init__(self, picture: Pixels, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._picture = picture

    def at(self, seconds: float) -> Pixels:
        """uint8[height, width, 3]: a view into the photograph, not a copy."""
        rows, columns = self._picture.shape[:2]
        left = _wander(seconds, _PERIODS[0], columns - self.width)
        top = _wander(seconds, _PERIODS[1], rows - self.height)
        return self._picture[top : top + self.height, left : left + self.width]


def enlarged(photograph: Pixels, width: int, height: int) -> Pixels:
    """`photograph` so large that a window of that size has room to move in it."""
    import cv2

    rows, columns = photograph.shape[:2]
    scale = _MARGIN * max(width / columns, height / rows)
    size = (math.ceil(columns * scale), math.ceil(rows * scale))
    return np.asarray(cv2.resize(photograph, size, interpolation=cv2.INTER_CUBIC), dtype=np.uint8)


def _wander(seconds: float, period: float, room: int) -> int:
    return round(room * (0.5 - 0.5 * math.cos(2.0 * math.pi * seconds / period)))
