"""Converting the encodings that have no direct view: through `cv_bridge` where it works, through OpenCV
elsewhere.

`cv_bridge` is there on every robot, yet it may be built against another numpy major version than the one that
runs, in which case it fails at import, or imports and fails at the first picture. So it is tried once, on
small pictures of every encoding, against OpenCV; whatever it cannot do exactly is done by OpenCV, and
`conversion_backend` says so.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .encodings import ENCODINGS, Conversion, Encoding
from .frame import ImageError

Pixels: TypeAlias = NDArray[np.uint8]
Converter: TypeAlias = Callable[[Pixels], Pixels]

_INSTALL = "install opencv-python-headless, or cv_bridge's package python3-opencv on a robot"


@dataclass(frozen=True)
class Backend:
    """What converts here. `bridged` maps the encodings that go through `cv_bridge` to the function that does
    it."""

    name: str
    reason: str
    opencv: ModuleType | None
    bridged: Mapping[str, Converter]


def conversion_backend() -> tuple[str, str]:
    """Which library converts images here, and why not a better one.

    Returns:
        `("cv_bridge" | "opencv" | "none", reason)`; the reason is empty when `cv_bridge` converts every
        encoding. The first call imports the libraries (some 0.1 s), so make it where time does not matter.
    """
    backend = find_backend()
    return backend.name, backend.reason


def convert(pixels: Pixels, encoding: Encoding) -> Pixels:
    """Convert one picture to RGB.

    Args:
        pixels: uint8[height, width] or uint8[height, width, 2], rows may be padded.
        encoding: a row of the table that has a conversion.

    Returns:
        uint8[height, width, 3], a new array.

    Raises:
        ImageError: the size is impossible for this encoding, or nothing here can convert it.
    """
    conversion = encoding.conversion
    if conversion is None:
        raise ImageError(f"encoding '{encoding.name}' needs no conversion")
    _check_size(pixels, encoding.name, conversion)
    backend = find_backend()
    if encoding.name in backend.bridged:
        return backend.bridged[encoding.name](pixels)
    return _with_opencv(require_opencv(f"encoding '{encoding.name}'"), conversion, pixels)


def require_opencv(what: str) -> ModuleType:
    """The `cv2` module; ImageError that says that `what` cannot be converted, why, and what to install."""
    backend = find_backend()
    if backend.opencv is None:
        raise ImageError(f"{what} cannot be converted here ({backend.reason}); {_INSTALL}")
    return backend.opencv


@cache
def find_backend() -> Backend:
    """Try the libraries once; see the module's text for what counts as working."""
    opencv, opencv_problem = _try_import("cv2")
    if opencv is None:
        return Backend("none", opencv_problem, None, {})
    bridge, bridge_problem = _try_import("cv_bridge.boost.cv_bridge_boost")
    if bridge is None:
        return Backend("opencv", bridge_problem, opencv, {})
    bridged, failures = _probe(bridge, opencv)
    reason = "; ".join(f"{name}: {problem}" for name, problem in failures.items())
    if not bridged:
        return Backend("opencv", f"cv_bridge imports and converts nothing: {reason}", opencv, {})
    return Backend("cv_bridge", f"through OpenCV instead: {reason}" if reason else "", opencv, bridged)


def _try_import(name: str) -> tuple[ModuleType | None, str]:
    try:
        return importlib.import_module(name), ""
    # An extension built against another numpy fails with whatever its initialiser raises: ImportError,
    # AttributeError, SystemError. None of them may stop a node whose cameras need no conversion.
    except Exception as error:
        lines = str(error).strip().splitlines() or ["no text"]
        return None, f"{name.split('.')[0]} does not import ({type(error).__name__}: {lines[0]})"


def _probe(bridge: ModuleType, opencv: ModuleType) -> tuple[dict[str, Converter], dict[str, str]]:
    """Sort the table into what this `cv_bridge` converts exactly as OpenCV does, and what it does not, with
    reasons."""
    working: dict[str, Converter] = {}
    failures: dict[str, str] = {}
    for encoding in ENCODINGS.values():
        if encoding.conversion is not None:
            candidate = _through_bridge(bridge, encoding.conversion)
            problem = _compare(candidate, encoding, opencv)
            if problem:
                failures[encoding.name] = problem
            else:
                working[encoding.name] = candidate
    return working, failures


def _through_bridge(bridge: ModuleType, conversion: Conversion) -> Converter:
    def call(pixels: Pixels) -> Pixels:
        return np.asarray(bridge.cvtColor2(pixels, conversion.bridge_name, "rgb8"), dtype=np.uint8)

    return call


def _compare(candidate: Converter, encoding: Encoding, opencv: ModuleType) -> str:
    """Empty if `candidate` gives OpenCV's pixels on a small picture, else what happened."""
    assert encoding.conversion is not None
    sample = _sample(encoding.bytes_per_pixel)
    try:
        result = candidate(sample)
    except Exception as error:
        return f"cv_bridge failed ({type(error).__name__}: {error})"
    equal = np.array_equal(result, _with_opencv(opencv, encoding.conversion, sample))
    return "" if equal else "cv_bridge gave other pixels than OpenCV"


def _sample(bytes_per_pixel: int) -> Pixels:
    """8x8 pixels as a message gives them: a read-only view of rows that are padded to 24 bytes."""
    padded = (np.arange(8 * 24) * 37 % 256).astype(np.uint8).reshape(8, 24)
    padded.flags.writeable = False
    return padded[:, :8] if bytes_per_pixel == 1 else padded[:, :16].reshape(8, 8, 2)


def _with_opencv(opencv: ModuleType, conversion: Conversion, pixels: Pixels) -> Pixels:
    return np.asarray(opencv.cvtColor(pixels, getattr(opencv, conversion.opencv_code)), dtype=np.uint8)


def _check_size(pixels: Pixels, name: str, conversion: Conversion) -> None:
    height, width = pixels.shape[:2]
    if width % conversion.width_multiple:
        multiple = conversion.width_multiple
        raise ImageError(f"encoding '{name}' needs a width that is a multiple of {multiple}, got {width}")
    if min(height, width) < conversion.smallest_side:
        side = conversion.smallest_side
        raise ImageError(f"encoding '{name}' needs at least {side}x{side} pixels, got {width}x{height}")
