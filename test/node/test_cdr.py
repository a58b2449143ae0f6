"""The CDR parser against the serialiser that rclpy uses, and against bytes that nobody should send.

The serialiser here writes the machine's byte order only, so big-endian messages come from the small writer
below, which is itself held against rclpy on little-endian ones.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rclpy.serialization import serialize_message
from sensor_msgs.msg import CompressedImage, Image, JointState
from std_msgs.msg import String

from flashrt_ros.node.cdr import (
    CdrError,
    parse_compressed_image,
    parse_image,
    parse_joint_state,
    parse_string,
)

pytestmark = pytest.mark.skipif(sys.byteorder != "little", reason="expects rclpy to write little-endian")

PARSERS: dict[str, Callable[[bytes], object]] = {
    "Image": parse_image,
    "CompressedImage": parse_compressed_image,
    "JointState": parse_joint_state,
    "String": parse_string,
}

texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)
uint8 = st.integers(0, 255)
uint32 = st.integers(0, 2**32 - 1)
int32 = st.integers(-(2**31), 2**31 - 1)
floats = st.lists(st.floats(), max_size=9)


def image(seconds: int, nanoseconds: int, frame: str, encoding: str, sizes: list[int], data: bytes) -> Image:
    message = Image(encoding=encoding, height=sizes[0], width=sizes[1], step=sizes[2], is_bigendian=sizes[3] % 256)
    message.header.stamp.sec, message.header.stamp.nanosec, message.header.frame_id = (
        seconds,
        nanoseconds,
        frame,
    )
    message.data = array("B", data)
    return message


def example_messages() -> dict[str, bytes]:
    """One serialised message of each type, none of them empty."""
    joints = JointState(name=["shoulder", "elbow"], position=[0.25, -1.5], velocity=[0.0, 1.0], effort=[2.0, 3.0])
    compressed = CompressedImage(format="jpeg", data=array("B", b"\xff\xd8\xff\xd9"))
    return {
        "Image": serialize_message(image(5, 6, "camera", "rgb8", [1, 2, 6, 0], b"abcdef")),
        "CompressedImage": serialize_message(compressed),
        "JointState": serialize_message(joints),
        "String": serialize_message(String(data="pick up the cup")),
    }


class Writer:
    """CDR by the book, in either byte order. Padding is 0xee, to catch whoever reads it."""

    def __init__(self, order: str) -> None:
        self.order = order
        self.body = bytearray()

    def put(self, code: str, *values: float) -> Writer:
        for value in values:
            self.body += b"\xee" * (-len(self.body) % struct.calcsize(code))
            self.body += struct.pack(self.order + code, value)
        return self

    def text(self, value: str) -> Writer:
        content = value.encode() + b"\0"
        self.put("I", len(content))
        self.body += content
        return self

    def texts(self, values: list[str]) -> Writer:
        self.put("I", len(values))
        for value in values:
            self.text(value)
        return self

    def octets(self, value: bytes) -> Writer:
        self.put("I", len(value))
        self.body += value
        return self

    def doubles(self, values: list[float]) -> Writer:
        return self.put("I", len(values)).put("d", *values)

    def message(self) -> bytes:
        return bytes((0, self.order == "<", 0, 0)) + bytes(self.body)


@given(seconds=int32, nanoseconds=uint32, frame=texts, encoding=texts, sizes=st.lists(uint32, min_size=4, max_size=4),
       data=st.binary(max_size=99))  # fmt: skip
def test_an_image_comes_back_as_rclpy_wrote_it(
    seconds: int, nanoseconds: int, frame: str, encoding: str, sizes: list[int], data: bytes
) -> None:
    parsed = parse_image(serialize_message(image(seconds, nanoseconds, frame, encoding, sizes, data)))
    assert parsed.header.stamp_ns == seconds * 10**9 + nanoseconds
    assert (parsed.header.frame_id, parsed.encoding) == (frame, encoding)
    assert [parsed.height, parsed.width, parsed.step, parsed.is_bigendian] == [*sizes[:3], sizes[3] % 256]
    assert bytes(parsed.data) == data


@given(format_text=texts, data=st.binary(max_size=99))
def test_a_compressed_image_comes_back_as_rclpy_wrote_it(format_text: str, data: bytes) -> None:
    parsed = parse_compressed_image(serialize_message(CompressedImage(format=format_text, data=array("B", data))))
    assert (parsed.format, bytes(parsed.data)) == (format_text, data)


@given(names=st.lists(texts, max_size=9), position=floats, velocity=floats, effort=floats)
def test_a_joint_state_comes_back_as_rclpy_wrote_it(
    names: list[str], position: list[float], velocity: list[float], effort: list[float]
) -> None:
    message = JointState(name=names, position=position, velocity=velocity, effort=effort)
    parsed = parse_joint_state(serialize_message(message))
    assert list(parsed.names) == names
    for got, sent in ((parsed.position, position), (parsed.velocity, velocity), (parsed.effort, effort)):
        assert got.dtype == np.float64
        np.testing.assert_array_equal(got, np.array(sent, np.float64))


@given(text=texts)
def test_a_string_comes_back_as_rclpy_wrote_it(text: str) -> None:
    assert parse_string(serialize_message(String(data=text))).data == text


@given(order=st.sampled_from("<>"), frame=texts, encoding=texts, sizes=st.tuples(uint32, uint32, uint8, uint32),
       data=st.binary(max_size=99))  # fmt: skip
def test_an_image_is_read_in_either_byte_order(
    order: str, frame: str, encoding: str, sizes: tuple[int, int, int, int], data: bytes
) -> None:
    writer = Writer(order).put("i", -7).put("I", 8).text(frame).put("I", *sizes[:2]).text(encoding)
    parsed = parse_image(writer.put("B", sizes[2]).put("I", sizes[3]).octets(data).message())
    assert parsed.header.stamp_ns == -7 * 10**9 + 8
    assert (parsed.height, parsed.width, parsed.is_bigendian, parsed.step) == sizes
    assert (parsed.header.frame_id, parsed.encoding, bytes(parsed.data)) == (frame, encoding, data)


@given(order=st.sampled_from("<>"), names=st.lists(texts, max_size=5), position=floats, velocity=floats)
def test_a_joint_state_is_read_in_either_byte_order(
    order: str, names: list[str], position: list[float], velocity: list[float]
) -> None:
    writer = Writer(order).put("I", 1, 2).text("").texts(names).doubles(position).doubles(velocity).doubles([])
    parsed = parse_joint_state(writer.message())
    assert list(parsed.names) == names
    np.testing.assert_array_equal(parsed.position, np.array(position, np.float64))
    np.testing.assert_array_equal(parsed.velocity, np.array(velocity, np.float64))
    assert parsed.effort.size == 0


def test_pixels_are_a_view_of_the_message_and_no_copy() -> None:
    raw = bytearray(serialize_message(image(0, 0, "camera", "rgb8", [1, 2, 6, 0], b"abcdef")))
    parsed = parse_image(raw)
    raw[-6:] = b"ABCDEF"
    assert bytes(parsed.data) == b"ABCDEF"


def test_joint_arrays_outlive_the_message_and_are_read_only() -> None:
    raw = bytearray(example_messages()["JointState"])
    position = parse_joint_state(raw).position
    raw[:] = bytes(len(raw))
    assert position.tolist() == [0.25, -1.5]
    with pytest.raises(ValueError, match="read-only"):
        position[0] = 1.0


def test_bytes_after_the_message_are_left_alone() -> None:
    for name, raw in example_messages().items():
        PARSERS[name](raw + b"left over by the serialiser")


def test_an_empty_string_may_have_length_zero() -> None:
    assert parse_string(Writer("<").put("I", 0).message()).data == ""


@given(cut=st.integers(0, 200), name=st.sampled_from(("Image", "CompressedImage", "String")))
def test_a_message_that_is_cut_off_anywhere_is_refused(cut: int, name: str) -> None:
    raw = example_messages()[name]
    with pytest.raises(CdrError):
        PARSERS[name](raw[: cut % len(raw)])


def test_a_joint_state_that_is_cut_off_anywhere_is_refused() -> None:
    writer = Writer("<").put("I", 1, 2).text("base").texts(["a", "b"]).doubles([1.0, 2.0]).doubles([]).doubles([3.0])
    raw = writer.message()
    parse_joint_state(raw)
    for length in range(len(raw)):
        with pytest.raises(CdrError):
            parse_joint_state(raw[:length])


@settings(max_examples=400)
@given(
    name=st.sampled_from(sorted(PARSERS)),
    changes=st.lists(st.tuples(st.integers(0, 10**6), uint8), max_size=8),
)
def test_changed_bytes_give_a_message_or_a_cdr_error(name: str, changes: list[tuple[int, int]]) -> None:
    raw = bytearray(example_messages()[name])
    for position, value in changes:
        raw[position % len(raw)] = value
    parse_or_refuse(name, bytes(raw))


@settings(max_examples=400)
@given(
    name=st.sampled_from(sorted(PARSERS)),
    kind=st.sampled_from((b"\0\0\0\0", b"\0\1\0\0", b"")),
    tail=st.binary(),
)
def test_any_bytes_give_a_message_or_a_cdr_error(name: str, kind: bytes, tail: bytes) -> None:
    parse_or_refuse(name, kind + tail)


def parse_or_refuse(name: str, raw: bytes) -> None:
    try:
        parsed = PARSERS[name](raw)
    except CdrError as refused:
        error = refused
    else:
        assert len(getattr(parsed, "data", b"")) <= len(raw)
        return
    assert error.field in str(error)
    assert 0 <= error.offset <= len(raw) + 8


@pytest.mark.parametrize(
    ("raw", "field", "offset", "words"),
    [
        (b"", "encapsulation", 0, "4 bytes needed"),
        (b"\0\7\0\0" + bytes(40), "encapsulation", 0, "CDR2, little-endian"),
        (b"\0\3\0\0" + bytes(40), "encapsulation", 0, "PL_CDR, little-endian"),
        (b"\x12\x34\0\0" + bytes(40), "encapsulation", 0, "0x1234 .unknown"),
        (b"\0\1\0\0" + bytes(4), "header.stamp", 4, "8 bytes needed, 4 left"),
        (
            Writer("<").put("I", 1, 2, 2**32 - 1).message(),
            "header.frame_id",
            16,
            "4294967295 bytes needed, 0 left",
        ),
        (
            Writer("<").put("I", 1, 2).text("").put("I", 1, 2, 3).message() + b"abc",
            "encoding",
            32,
            "not terminated",
        ),
        (Writer("<").put("I", 1, 2, 3).message() + b"a\0\0", "header.frame_id", 16, "NUL inside"),
        (Writer("<").put("I", 1, 2, 3).message() + b"a\xff\0", "header.frame_id", 17, "not UTF-8"),
        (
            Writer("<").put("I", 1, 2).text("c").put("I", 1, 2).text("rgb8").put("B", 0).put("I", 6, 999).message(),
            "data",
            48,
            "999 bytes needed, 0 left",
        ),
    ],
)
def test_an_image_error_names_field_offset_and_problem(raw: bytes, field: str, offset: int, words: str) -> None:
    with pytest.raises(CdrError, match=words) as caught:
        parse_image(raw)
    assert (caught.value.field, caught.value.offset) == (field, offset)
    assert caught.value.message_type == "sensor_msgs/msg/Image"


def test_an_absurd_number_of_names_is_refused_before_anything_is_allocated() -> None:
    with pytest.raises(CdrError, match="4294967295 strings need"):
        parse_joint_state(Writer("<").put("I", 1, 2).text("").put("I", 2**32 - 1).message() + bytes(64))


def test_an_absurd_number_of_positions_is_refused_before_anything_is_allocated() -> None:
    with pytest.raises(CdrError, match="'position' at byte") as caught:
        parse_joint_state(Writer("<").put("I", 1, 2).text("").texts([]).put("I", 2**31).message() + bytes(64))
    assert caught.value.field == "position"


def test_the_error_names_the_string_of_a_list() -> None:
    raw = Writer("<").put("I", 1, 2).text("").put("I", 2).text("ok").put("I", 2).message() + b"xyzw"
    with pytest.raises(CdrError, match=r"name\[1\]"):
        parse_joint_state(raw)
