"""Is this JPEG whole? The structure is walked from mark to mark before any decoder sees the data.

Cameras send baseline or extended Huffman pictures in one scan. Anything else (progressive, arithmetic,
several scans) is refused by name, because there the loss of data shows as blur, which nothing can tell from a
real picture.
"""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass, replace

import numpy as np

from .frame import ImageError

_SOI, _EOI, _SOS, _DRI = 0xD8, 0xD9, 0xDA, 0xDD
_SUPPORTED_FRAMES = (0xC0, 0xC1)
_REFUSED_FRAMES = {
    0xC2: "progressive",
    0xC3: "lossless",
    0xC5: "hierarchical",
    0xC6: "hierarchical progressive",
    0xC7: "hierarchical lossless",
    0xC9: "arithmetic-coded",
    0xCA: "arithmetic-coded progressive",
    0xCB: "arithmetic-coded lossless",
    0xCD: "arithmetic-coded hierarchical",
    0xCE: "arithmetic-coded hierarchical progressive",
    0xCF: "arithmetic-coded hierarchical lossless",
}
_RESTARTS = range(0xD0, 0xD8)


@dataclass(frozen=True, slots=True)
class JpegLayout:
    """Size in pixels, components (1 or 3), size in pixels of one coded block, and where the scan's data
    end."""

    height: int
    width: int
    components: int
    block_height: int
    block_width: int
    scan_end: int = 0

    @property
    def blocks(self) -> int:
        """Coded blocks (MCU) of the picture."""
        return -(-self.height // self.block_height) * -(-self.width // self.block_width)


def check_jpeg(data: memoryview) -> JpegLayout:
    """Walk a JPEG from its first mark to its last.

    Raises:
        ImageError: not a JPEG, cut off, restart marks missing or out of order, or of a kind that is refused.
    """
    if bytes(data[:2]) != bytes((0xFF, _SOI)):
        raise ImageError("not a JPEG: the data do not start with ff d8")
    frame: JpegLayout | None = None
    interval, offset = 0, 2
    while True:
        mark, body, following = _segment(data, offset)
        if mark in _SUPPORTED_FRAMES:
            frame = _read_frame(body)
        elif mark in _REFUSED_FRAMES:
            raise ImageError(f"a {_REFUSED_FRAMES[mark]} JPEG is refused; publish baseline JPEG")
        elif mark == _DRI:
            interval = _unpack(">H", body, "restart interval")[0]
        elif mark == _SOS:
            return _check_scan(data, following, body, frame, interval)
        offset = following


def with_extra_scan_data(data: memoryview, layout: JpegLayout) -> memoryview:
    """The same picture with noise after its data, which a decoder reads only if the data were too short."""
    noise = bytes(random.Random(0).choices(range(255), k=4096))
    return memoryview(b"".join((data[: layout.scan_end], noise, data[layout.scan_end :])))


def _segment(data: memoryview, offset: int) -> tuple[int, memoryview, int]:
    """The mark at `offset`, the segment's content, and the offset that follows."""
    while offset + 1 < len(data) and data[offset] == 0xFF and data[offset + 1] == 0xFF:
        offset += 1
    if offset + 4 > len(data):
        raise ImageError(f"truncated JPEG: {len(data)} bytes end before the picture's data begin")
    mark, length = data[offset + 1], data[offset + 2] << 8 | data[offset + 3]
    if data[offset] != 0xFF or mark in (0, 1, _SOI, _EOI, *_RESTARTS) or length < 2:
        raise ImageError(f"damaged JPEG: no segment at byte {offset}, where one is due")
    if offset + 2 + length > len(data):
        raise ImageError(f"truncated JPEG: the segment at byte {offset} reaches past the end")
    return mark, data[offset + 4 : offset + 2 + length], offset + 2 + length


def _read_frame(body: memoryview) -> JpegLayout:
    """The sizes that a start-of-frame segment announces."""
    precision, height, width, components = _unpack(">BHHB", body, "frame")
    if precision != 8:
        raise ImageError(f"a JPEG of {precision} bits a channel is refused; publish 8 bits")
    if components not in (1, 3) or len(body) < 6 + 3 * components:
        raise ImageError(f"a JPEG of {components} components is refused; publish grey or colour (1 or 3)")
    if not height or not width:
        raise ImageError(f"a JPEG of {width}x{height} pixels is refused")
    if components == 1:
        return JpegLayout(height, width, 1, 8, 8)
    factors = [body[7 + 3 * index] for index in range(3)]
    horizontal, vertical = max(f >> 4 for f in factors), max(f & 15 for f in factors)
    if not all(1 <= f >> 4 <= 4 and 1 <= f & 15 <= 4 for f in factors):
        raise ImageError("damaged JPEG: a sampling factor is not between 1 and 4")
    return JpegLayout(height, width, 3, 8 * vertical, 8 * horizontal)


def _check_scan(data: memoryview, start: int, body: memoryview, frame: JpegLayout | None, interval: int) -> JpegLayout:
    if frame is None:
        raise ImageError("damaged JPEG: picture data before the picture's size")
    if not body or body[0] != frame.components:
        raise ImageError("a JPEG in several scans is refused; publish baseline JPEG in one interleaved scan")
    restarts, end, mark = _walk_scan(data, start)
    if mark is None:
        raise ImageError(f"truncated JPEG: {len(data)} bytes and no end mark (ff d9)")
    if mark != _EOI:
        raise ImageError(f"damaged JPEG: mark ff {mark:02x} at byte {end}, within the picture's data")
    _check_restarts(restarts, frame.blocks, interval)
    return replace(frame, scan_end=end)


def _walk_scan(data: memoryview, start: int) -> tuple[list[int], int, int | None]:
    """The restart marks of the scan, where it ends, and the mark that ends it (None: the data end first)."""
    scan = np.frombuffer(data, np.uint8)[start:]
    # Within a scan 0xff is followed by 0 (it is a data byte), by a mark, or by another 0xff as filling.
    following = scan[1:]
    places = np.flatnonzero((scan[:-1] == 0xFF) & (following != 0) & (following != 0xFF))
    marks = following[places]
    ends = np.flatnonzero((marks < _RESTARTS.start) | (marks >= _RESTARTS.stop))
    if not len(ends):
        return marks.tolist(), len(data), None
    last = int(ends[0])
    return marks[:last].tolist(), start + int(places[last]), int(marks[last])


def _check_restarts(restarts: list[int], blocks: int, interval: int) -> None:
    expected = -(-blocks // interval) - 1 if interval else 0
    in_order = all(mark == _RESTARTS[index % 8] for index, mark in enumerate(restarts))
    if len(restarts) != expected or not in_order:
        order = "" if in_order else ", out of order"
        raise ImageError(f"incomplete JPEG: {len(restarts)} of {expected} restart marks{order}")


def _unpack(layout: str, body: memoryview, what: str) -> tuple[int, ...]:
    if len(body) < struct.calcsize(layout):
        needed = struct.calcsize(layout)
        raise ImageError(f"damaged JPEG: its {what} segment has {len(body)} bytes, expected {needed}")
    return struct.unpack_from(layout, body)
