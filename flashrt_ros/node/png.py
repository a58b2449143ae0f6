"""Is this PNG whole? Every chunk carries a checksum, and the last one says that it is the last."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from .frame import ImageError

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_CHANNELS = {0: 1, 2: 3, 3: 3, 4: 4, 6: 4}
_FRAME_BYTES = 12


@dataclass(frozen=True, slots=True)
class PngLayout:
    """Size in pixels and the channels that a decoder makes of them (a palette becomes 3, grey with alpha
    4)."""

    height: int
    width: int
    channels: int


def check_png(data: memoryview) -> PngLayout:
    """Walk a PNG chunk by chunk and verify each checksum.

    Raises:
        ImageError: not a PNG, cut off, damaged, or not of 8 bits a channel.
    """
    if bytes(data[:8]) != _SIGNATURE:
        raise ImageError("not a PNG: the data do not start with its signature")
    layout: PngLayout | None = None
    offset = len(_SIGNATURE)
    while True:
        kind, body, following = _chunk(data, offset)
        if layout is None:
            layout = _read_header(kind, body)
        elif kind == b"IEND":
            return layout
        offset = following


def _chunk(data: memoryview, offset: int) -> tuple[bytes, memoryview, int]:
    """Type and content of the chunk at `offset`, and the offset of the next one."""
    if offset + _FRAME_BYTES > len(data):
        raise ImageError(f"truncated PNG: {len(data)} bytes and no end chunk (IEND)")
    stop = offset + _FRAME_BYTES + int.from_bytes(data[offset : offset + 4], "big")
    if stop > len(data):
        raise ImageError(f"truncated PNG: the chunk at byte {offset} reaches past the end")
    if zlib.crc32(data[offset + 4 : stop - 4]) != int.from_bytes(data[stop - 4 : stop], "big"):
        raise ImageError(f"damaged PNG: wrong checksum of the chunk at byte {offset}")
    return bytes(data[offset + 4 : offset + 8]), data[offset + 8 : stop - 4], stop


def _read_header(kind: bytes, body: memoryview) -> PngLayout:
    if kind != b"IHDR" or len(body) != 13:
        raise ImageError("damaged PNG: its first chunk is not a header (IHDR)")
    width, height, depth, colour = struct.unpack_from(">IIBB", body)
    if depth == 16:
        raise ImageError("a PNG of 16 bits a channel is refused; publish 8 bits")
    if colour not in _CHANNELS or not height or not width:
        raise ImageError(f"damaged PNG: colour type {colour}, {width}x{height} pixels")
    return PngLayout(height, width, _CHANNELS[colour])
