"""The order of the channels in an image window: the one convention that a host and a policy's first op
share."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray


class PixelOrder(IntEnum):
    """What the channels of a raw `uint8` image mean, as the int32 code in the `image_format` window.

    The host never reorders channels: it copies the camera's bytes and writes this code beside them, and the
    first op of the context stage reads the pixels accordingly. A fourth channel of `RGB` or `BGR` is alpha
    and is ignored.
    """

    RGB = 0
    BGR = 1
    MONO = 2


CHANNELS: Mapping[PixelOrder, tuple[int, ...]] = MappingProxyType(
    {PixelOrder.RGB: (3, 4), PixelOrder.BGR: (3, 4), PixelOrder.MONO: (1,)}
)
"""How many channels an image of each order may have."""


def copy_pixels(window: NDArray[np.uint8], pixels: NDArray[np.uint8]) -> int:
    """Copy a frame, rows packed, to the start of its window: the only copy that a frame ever sees.

    Args:
        window: uint8[capacity], contiguous and writable, at least as large as the frame.
        pixels: uint8[height, width, channels]; the padding of strided rows is left behind in the same copy.

    Returns:
        Bytes copied: height × width × channels. Bytes of the window beyond them keep their old content.
    """
    np.copyto(window[: pixels.size].reshape(pixels.shape), pixels)
    return pixels.size
