"""`sensor_msgs/CompressedImage`: JPEG and PNG, decoded whole or refused.

Decoders are lenient: given half a JPEG they return a picture whose lower half is grey. So the container is
checked before it is decoded (`jpeg`, `png`), and what a decoder made of a JPEG is looked at afterwards.

`format` follows `compressed_image_transport`: either a codec alone (`jpeg`, `png`), or `<encoding>; <codec>
compressed <layout>`, where the layout says what was handed to the compressor: `bgr8` for a colour picture,
nothing for a monochrome or Bayer one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..policies.pixels import PixelOrder
from .cdr import CompressedImageMessage
from .conversions import convert, require_opencv
from .encodings import Encoding, find_encoding
from .frame import Frame, ImageError
from .jpeg import JpegLayout, check_jpeg, with_extra_scan_data
from .png import check_png

_CODECS = {"jpeg": "jpeg", "jpg": "jpeg", "png": "png"}
_MAGIC = {b"\xff\xd8": "jpeg", b"\x89P": "png"}
_SUPPORTED = "'jpeg', 'png', '<encoding>; jpeg compressed bgr8', '<encoding>; png compressed bgr8'"
_FORMAT = re.compile(r"(?P<encoding>\w+)\s*;\s*(?P<codec>\w+)\s+compressed(?:\s+(?P<layout>\w+))?")
_ORDER_OF_LAYOUT = {"bgr8": PixelOrder.BGR, "rgb8": PixelOrder.RGB}
# Decoding a frame that no window could hold only serves whoever wants to exhaust memory.
_MAX_BYTES = 1 << 28
# What a JPEG decoder writes where the data ended early, in every channel.
_MISSING = 128


@dataclass(frozen=True, slots=True)
class _Format:
    codec: str
    encoding: Encoding | None
    layout: str


def decode_compressed(message: CompressedImageMessage, capacity: int = _MAX_BYTES) -> Frame:
    """Decode a JPEG or PNG picture.

    Args:
        message: the parsed message.
        capacity: bytes of the window; a picture that would be larger is refused before it is decoded.

    Returns:
        A frame that owns its pixels: BGR or MONO as decoded, RGB from a Bayer pattern.

    Raises:
        ImageError: unknown format, damaged or incomplete data, 16 bits a channel, too large, or no decoder
            here.

    A PNG carries checksums, a JPEG does not. A JPEG that is cut off, that lacks a restart interval, or that
    has data for all but its last row of blocks or less is always refused; bytes that were changed or lost in
    the middle may give a wrong picture of full size, which nothing can tell from a right one.
    """
    wanted = _parse_format(message.format)
    _check_codec(wanted.codec, message)
    decode = _decode_jpeg if wanted.codec == "jpeg" else _decode_png
    return _interpret(decode(message.data, capacity), wanted, message.format)


def _parse_format(text: str) -> _Format:
    stripped = text.strip()
    if stripped.lower() in _CODECS:
        return _Format(_CODECS[stripped.lower()], None, "")
    match = _FORMAT.fullmatch(stripped)
    if match is None or match["codec"] not in _CODECS:
        raise ImageError(f"compressed format '{text}' is refused; supported: {_SUPPORTED}")
    layout = match["layout"] or ""
    if layout and layout not in (*_ORDER_OF_LAYOUT, "mono8"):
        known = "bgr8, rgb8, mono8"
        raise ImageError(f"compressed format '{text}' is refused: layout '{layout}' is none of {known}")
    return _Format(_CODECS[match["codec"]], find_encoding(match["encoding"]), layout)


def _check_codec(codec: str, message: CompressedImageMessage) -> None:
    found = _MAGIC.get(bytes(message.data[:2]))
    if found != codec:
        start = bytes(message.data[:4]).hex(" ") or "nothing"
        raise ImageError(f"format '{message.format}' announces {codec}, but the data start with {start}")


def _decode_jpeg(data: memoryview, capacity: int) -> NDArray[np.uint8]:
    layout = check_jpeg(data)
    _check_capacity(layout.height, layout.width, layout.components, capacity)
    pixels = _decode(data, "jpeg")
    if _looks_unfinished(pixels, layout):
        continued = _decode(with_extra_scan_data(data, layout), "jpeg")
        if not np.array_equal(pixels, continued):
            raise ImageError("incomplete JPEG: its data end before the picture does")
    return pixels


def _decode_png(data: memoryview, capacity: int) -> NDArray[np.uint8]:
    layout = check_png(data)
    _check_capacity(layout.height, layout.width, layout.channels, capacity)
    return _decode(data, "png")


def _check_capacity(height: int, width: int, channels: int, capacity: int) -> None:
    needed = height * width * channels
    if needed > capacity:
        raise ImageError(
            f"a picture of {width}x{height} with {channels} channels needs {needed} bytes, its window holds "
            f"{capacity}; lower the camera's resolution or raise the policy's largest image size"
        )


def _decode(data: memoryview, codec: str) -> NDArray[np.uint8]:
    opencv = require_opencv(f"{codec} data")
    # UNCHANGED keeps monochrome pictures monochrome and, unlike COLOR, does not turn the picture by its EXIF
    # tag.
    pixels = opencv.imdecode(np.frombuffer(data, np.uint8), opencv.IMREAD_UNCHANGED)
    if pixels is None:
        raise ImageError(f"damaged {codec} data: OpenCV cannot decode them")
    if pixels.dtype != np.uint8:
        raise ImageError(f"{codec} with {pixels.dtype} channels is refused; publish 8 bits a channel")
    return np.asarray(pixels, dtype=np.uint8)


def _looks_unfinished(pixels: NDArray[np.uint8], layout: JpegLayout) -> bool:
    """True if the last block is what a decoder puts where data are missing; a real grey corner looks the
    same."""
    rows = _inner(layout.height, layout.block_height)
    columns = _inner(layout.width, layout.block_width)
    return bool((pixels[rows, columns] == _MISSING).all())


def _inner(length: int, block: int) -> slice:
    """The last block of a side without its first two pixels: colour is blended there with the block
    before."""
    start = (length - 1) // block * block
    return slice(min(start + 2, length - 1), None)


def _interpret(pixels: NDArray[np.uint8], wanted: _Format, text: str) -> Frame:
    channels = 1 if pixels.ndim == 2 else pixels.shape[2]
    if channels == 1:
        return _interpret_single_channel(pixels, wanted, text)
    if wanted.encoding is None:
        return Frame(pixels, PixelOrder.BGR)
    if wanted.layout not in _ORDER_OF_LAYOUT:
        raise ImageError(
            f"compressed format '{text}' names no colour layout, but the picture has {channels} channels; "
            "expected 'compressed bgr8' at the end"
        )
    # The decoder returns BGR; 'rgb8' means that RGB was handed to the compressor as if it were BGR.
    return Frame(pixels, _ORDER_OF_LAYOUT[wanted.layout])


def _interpret_single_channel(pixels: NDArray[np.uint8], wanted: _Format, text: str) -> Frame:
    if wanted.encoding is None or wanted.encoding.order is PixelOrder.MONO or wanted.layout == "mono8":
        return Frame(pixels.reshape(*pixels.shape[:2], 1), PixelOrder.MONO)
    if wanted.encoding.name.startswith("bayer_") and not wanted.layout:
        return Frame(convert(pixels.reshape(pixels.shape[:2]), wanted.encoding), PixelOrder.RGB)
    raise ImageError(f"compressed format '{text}' announces colour, but the picture has one channel")
