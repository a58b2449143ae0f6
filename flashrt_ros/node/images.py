"""From a parsed camera message to a frame: viewed in place, converted, or refused by name."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .cdr import CompressedImageMessage, ImageMessage
from .compressed import decode_compressed
from .conversions import conversion_backend, convert
from .encodings import ENCODINGS, Encoding, find_encoding
from .frame import Frame, ImageError

__all__ = [
    "ENCODINGS",
    "Frame",
    "ImageError",
    "conversion_backend",
    "decode_compressed",
    "image_to_frame",
]


def image_to_frame(message: ImageMessage | CompressedImageMessage, capacity: int | None = None) -> Frame:
    """The frame that a camera message holds.

    Raw encodings with a direct view (`rgb8`, `bgr8`, `rgba8`, `bgra8`, `mono8`, `8UC1`) give a view of the
    message's bytes, row padding skipped by its stride; `is_bigendian` is ignored, since one byte has no
    order. `yuv422` variants and 8-bit Bayer patterns are converted to RGB, JPEG and PNG are decoded; each of
    these owns its pixels.

    Args:
        message: as `cdr` parsed it.
        capacity: bytes of the frame's window; a larger JPEG or PNG is refused before it is decoded.

    Raises:
        ImageError: an encoding that is not supported, sizes that contradict each other, damaged or incomplete
            data, or a conversion that nothing here can do.
    """
    if isinstance(message, CompressedImageMessage):
        return decode_compressed(message) if capacity is None else decode_compressed(message, capacity)
    encoding = find_encoding(message.encoding)
    _check_sizes(message, encoding)
    pixels = _view(message, encoding)
    if encoding.conversion is None:
        return Frame(pixels, encoding.order)
    return Frame(convert(pixels[:, :, 0] if encoding.bytes_per_pixel == 1 else pixels, encoding), encoding.order)


def _view(message: ImageMessage, encoding: Encoding) -> NDArray[np.uint8]:
    """uint8[height, width, bytes per pixel] over the message's own bytes."""
    depth = encoding.bytes_per_pixel
    shape = (message.height, message.width, depth)
    return np.ndarray(shape, np.uint8, message.data, strides=(message.step, depth, 1))


def _check_sizes(message: ImageMessage, encoding: Encoding) -> None:
    height, width, step, size = message.height, message.width, message.step, len(message.data)
    if not height or not width:
        raise ImageError(f"an image of {width}x{height} pixels is refused: the camera sent no picture")
    row = width * encoding.bytes_per_pixel
    if step < row:
        raise ImageError(f"step is {step} bytes, but a row of {width} pixels in {encoding.name} takes {row}")
    if height * step != size:
        raise ImageError(f"height x step is {height} x {step} = {height * step} bytes, but data has {size}")
