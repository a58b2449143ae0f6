"""Serialised ROS messages (CDR) as small Python objects, without deserialising the payload.

A subscription made with `raw=True` hands over the bytes as they came off the wire. This module reads the few
header fields and returns the payload (pixels, compressed data) as a view into those bytes, so that the only
copy of a frame is the one into the policy's window. Reading a 1280x720 image this way takes microseconds;
building the message object takes the better part of a millisecond.

The encoding is plain CDR of XCDR version 1, little- or big-endian, which is what every ROS 2 middleware sends
for these types: a four-byte encapsulation header, then each primitive aligned to its own size counted from
the end of that header. Two habits of real serialisers are allowed for: padding holds whatever was in memory,
and a message may be followed by a few unused bytes.

Whatever the bytes are, a parser returns a message or raises `CdrError`; every length is checked against what
is there before anything is read or allocated.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

RawBytes: TypeAlias = bytes | bytearray | memoryview
"""What the parsers accept: one whole serialised message, encapsulation header included."""

_ENCAPSULATION: Final = 4
_LITTLE_ENDIAN: Final = 0x0001
_KINDS: Final = {
    0x0000: "CDR, big-endian",
    0x0001: "CDR, little-endian",
    0x0002: "PL_CDR, big-endian",
    0x0003: "PL_CDR, little-endian",
    0x0006: "CDR2, big-endian",
    0x0007: "CDR2, little-endian",
    0x0008: "D_CDR2, big-endian",
    0x0009: "D_CDR2, little-endian",
    0x000A: "PL_CDR2, big-endian",
    0x000B: "PL_CDR2, little-endian",
}
_TIME: Final = {"<": struct.Struct("<iI"), ">": struct.Struct(">iI")}
_U32: Final = {"<": struct.Struct("<I"), ">": struct.Struct(">I")}
_F64: Final = {"<": np.dtype("<f8"), ">": np.dtype(">f8")}
_EMPTY_STRING_BYTES: Final = 4


class CdrError(ValueError):
    """Bytes that are not a serialised message of the expected type.

    Attributes: `message_type` (as in `sensor_msgs/msg/Image`), `field` (as in `header.frame_id`) and `offset`
    (the byte, counted from the first of the encapsulation header, where reading that field failed).
    """

    def __init__(self, message_type: str, field: str, offset: int, problem: str) -> None:
        self.message_type = message_type
        self.field = field
        self.offset = offset
        super().__init__(f"{message_type}: field '{field}' at byte {offset}: {problem}")


@dataclass(frozen=True, slots=True)
class Header:
    """`std_msgs/Header`. `stamp_ns` is the time of acquisition in nanoseconds; 0 means that nobody stamped
    it."""

    stamp_ns: int
    frame_id: str


@dataclass(frozen=True, slots=True, eq=False)
class ImageMessage:
    """`sensor_msgs/Image`. `data` is a read-through view of the serialised bytes, `step` is bytes a row."""

    header: Header
    height: int
    width: int
    encoding: str
    is_bigendian: int
    step: int
    data: memoryview


@dataclass(frozen=True, slots=True, eq=False)
class CompressedImageMessage:
    """`sensor_msgs/CompressedImage`. `data` is a view of the serialised bytes."""

    header: Header
    format: str
    data: memoryview


@dataclass(frozen=True, slots=True, eq=False)
class JointStateMessage:
    """`sensor_msgs/JointState`. The three arrays are read-only float64[n]; n may differ from `len(names)`."""

    header: Header
    names: tuple[str, ...]
    position: NDArray[np.float64]
    velocity: NDArray[np.float64]
    effort: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StringMessage:
    """`std_msgs/String`."""

    data: str


def parse_image(raw: RawBytes) -> ImageMessage:
    """Read a `sensor_msgs/Image`. Checks the wire format only; whether the sizes agree is the image table's
    business.

    Raises `CdrError` for anything that is not a whole message.
    """
    reader = _Reader(raw, "sensor_msgs/msg/Image")
    return ImageMessage(
        header=reader.header(),
        height=reader.uint32("height"),
        width=reader.uint32("width"),
        encoding=reader.string("encoding"),
        is_bigendian=reader.uint8("is_bigendian"),
        step=reader.uint32("step"),
        data=reader.byte_sequence("data"),
    )


def parse_compressed_image(raw: RawBytes) -> CompressedImageMessage:
    """Read a `sensor_msgs/CompressedImage`. Raises `CdrError` for anything that is not a whole message."""
    reader = _Reader(raw, "sensor_msgs/msg/CompressedImage")
    return CompressedImageMessage(
        header=reader.header(), format=reader.string("format"), data=reader.byte_sequence("data")
    )


def parse_joint_state(raw: RawBytes) -> JointStateMessage:
    """Read a `sensor_msgs/JointState`. Raises `CdrError` for anything that is not a whole message."""
    reader = _Reader(raw, "sensor_msgs/msg/JointState")
    return JointStateMessage(
        header=reader.header(),
        names=reader.string_sequence("name"),
        position=reader.float64_sequence("position"),
        velocity=reader.float64_sequence("velocity"),
        effort=reader.float64_sequence("effort"),
    )


def parse_string(raw: RawBytes) -> StringMessage:
    """Read a `std_msgs/String`. Raises `CdrError` for anything that is not a whole message."""
    return StringMessage(data=_Reader(raw, "std_msgs/msg/String").string("data"))


class _Reader:
    """A cursor over one serialised message that cannot leave it."""

    __slots__ = ("_byte_order", "_end", "_offset", "_type", "_unpack_uint32", "_view")

    def __init__(self, raw: RawBytes, message_type: str) -> None:
        self._view = memoryview(raw).cast("B")
        self._end = len(self._view)
        self._type = message_type
        self._offset = _ENCAPSULATION
        self._byte_order = self._read_encapsulation()
        self._unpack_uint32 = _U32[self._byte_order].unpack_from

    def header(self) -> Header:
        start = self._take("header.stamp", 8, alignment=4)
        seconds, nanoseconds = _TIME[self._byte_order].unpack_from(self._view, start)
        return Header(seconds * 1_000_000_000 + nanoseconds, self.string("header.frame_id"))

    def uint8(self, field: str) -> int:
        return self._view[self._take(field, 1)]

    def uint32(self, field: str) -> int:
        value: int = self._unpack_uint32(self._view, self._take(field, 4, alignment=4))[0]
        return value

    def string(self, field: str) -> str:
        length = self.uint32(field)
        start = self._take(field, length)
        # CDR counts the terminating NUL, so that an empty string has length 1; some vendors write 0.
        return self._decode(field, start, start + length) if length else ""

    def byte_sequence(self, field: str) -> memoryview:
        length = self.uint32(field)
        start = self._take(field, length)
        return self._view[start : start + length]

    def string_sequence(self, field: str) -> tuple[str, ...]:
        count = self.uint32(field)
        self._require(field, count * _EMPTY_STRING_BYTES, f"{count} strings")
        return tuple(self.string(f"{field}[{index}]") for index in range(count))

    def float64_sequence(self, field: str) -> NDArray[np.float64]:
        count = self.uint32(field)
        # An empty sequence is not followed by padding, so it must not ask for any.
        start = self._take(field, 8 * count, alignment=8 if count else 1)
        values = np.frombuffer(self._view, _F64[self._byte_order], count, start).astype(np.float64)
        values.flags.writeable = False
        return values

    def _read_encapsulation(self) -> str:
        if self._end < _ENCAPSULATION:
            raise self._error("encapsulation", 0, f"4 bytes needed, the whole message has {self._end}")
        kind = self._view[0] << 8 | self._view[1]
        if kind > _LITTLE_ENDIAN:
            found = f"0x{kind:04x} ({_KINDS.get(kind, 'unknown')})"
            raise self._error("encapsulation", 0, f"kind {found}; expected plain CDR, 0x0000 or 0x0001")
        return "<" if kind == _LITTLE_ENDIAN else ">"

    def _take(self, field: str, size: int, alignment: int = 1) -> int:
        """Skip padding, claim `size` bytes and return where they start."""
        start = self._offset + (_ENCAPSULATION - self._offset) % alignment
        if start + size > self._end:
            raise self._error(field, start, f"{size} bytes needed, {max(0, self._end - start)} left")
        self._offset = start + size
        return start

    def _require(self, field: str, size: int, what: str) -> None:
        if self._offset + size > self._end:
            left = self._end - self._offset
            raise self._error(field, self._offset, f"{what} need {size} bytes at least, {left} left")

    def _decode(self, field: str, start: int, stop: int) -> str:
        content = bytes(self._view[start:stop])
        if content.find(b"\0") != len(content) - 1:
            problem = "not terminated by a NUL" if content[-1] else "a NUL inside the text"
            raise self._error(field, start, problem)
        try:
            return content[:-1].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._error(field, start + error.start, f"not UTF-8 ({error.reason})") from None

    def _error(self, field: str, offset: int, problem: str) -> CdrError:
        return CdrError(self._type, field, offset, problem)
