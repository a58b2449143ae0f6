"""The C interface in Python's terms: what include/flashrt_contract.h declares, field by field and number by number.

The header is the definition and explains every item. The tests compile it and compare sizes, offsets, signatures and
numbers with this module, and both with the table kept for the ABI version.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import POINTER, c_char, c_char_p, c_int32, c_uint32, c_uint64, c_void_p
from enum import IntEnum
from typing import Any, ClassVar

from ..contract import DType, Rate, Role

ABI_VERSION = 1
CAPSULE_NAME = b"flashrt_ros.contract.v1"  # a PyCapsule keeps the pointer, so this object must outlive every capsule


class Status(IntEnum):
    """What a call answers; `FLASHRT_<name>` in C."""

    OK = 0
    INTERRUPTED = 1
    FAILED = 2
    WRONG_ABI = 3
    TOO_SMALL = 4
    BAD_ARGUMENT = 5
    UNKNOWN_BUFFER = 6
    UNKNOWN_REGION = 7
    NOT_A_WINDOW = 8
    DOES_NOT_FIT = 9
    NOT_BEGUN = 10
    OUT_OF_RANGE = 11
    STALE = 12
    UNFILLED = 13
    BUSY = 14
    NOT_CONFIGURED = 15
    CLOSED = 16


DEVICE_CODES: Mapping[str, int] = {"cpu": 0, "cuda": 1}
ROLE_CODES: Mapping[Role, int] = {Role.STATIC: 0, Role.SWAP: 1, Role.STATE: 2, Role.SCRATCH: 3}
RATE_CODES: Mapping[Rate, int] = {Rate.CHECKPOINT: 0, Rate.PROMPT: 1, Rate.OBSERVATION: 2, Rate.STEP: 3}
DTYPE_CODES: Mapping[DType, int] = {
    DType.UINT8: 0,
    DType.INT32: 1,
    DType.INT64: 2,
    DType.FLOAT8_E4M3: 3,
    DType.FLOAT16: 4,
    DType.BFLOAT16: 5,
    DType.FLOAT32: 6,
}

Fields = list[tuple[str, Any]]


class BufferView(ctypes.Structure):
    """`flashrt_buffer`."""

    _fields_: ClassVar[Fields] = [
        ("name", c_char_p),
        ("device_address", c_void_p),
        ("host_address", c_void_p),
        ("shape", POINTER(c_uint64)),
        ("nbytes", c_uint64),
        ("rank", c_uint32),
        ("dtype", c_uint32),
        ("role", c_uint32),
        ("rate", c_uint32),
        ("filled_by_host", c_uint32),
        ("reserved", c_uint32),
    ]


class StageView(ctypes.Structure):
    """`flashrt_stage`."""

    _fields_: ClassVar[Fields] = [
        ("name", c_char_p),
        ("reads", POINTER(c_uint32)),
        ("writes", POINTER(c_uint32)),
        ("read_count", c_uint32),
        ("write_count", c_uint32),
        ("rate", c_uint32),
        ("reserved", c_uint32),
    ]


class RegionView(ctypes.Structure):
    """`flashrt_region`."""

    _fields_: ClassVar[Fields] = [
        ("name", c_char_p),
        ("live_extent", c_char_p),
        ("offset", c_uint64),
        ("nbytes", c_uint64),
        ("blocks", c_uint64),
        ("rows", c_uint64),
        ("row_bytes", c_uint64),
        ("buffer", c_uint32),
        ("reserved", c_uint32),
    ]


# A callback answers through its last argument and returns nothing: when Python code raises before its first line (a
# pending Ctrl-C, an exhausted stack), ctypes leaves a return value undefined, whereas what the caller wrote to
# `*status` stays.
_Status = POINTER(c_int32)
CALLBACKS: Mapping[str, Any] = {
    "begin_fill": ctypes.CFUNCTYPE(None, c_void_p, c_uint32, POINTER(c_void_p), _Status),
    "filled": ctypes.CFUNCTYPE(None, c_void_p, c_uint32, c_uint64, _Status),
    "draw": ctypes.CFUNCTYPE(None, c_void_p, c_uint32, _Status),
    "act": ctypes.CFUNCTYPE(None, c_void_p, _Status),
    "read": ctypes.CFUNCTYPE(None, c_void_p, c_uint32, c_uint64, c_uint64, c_void_p, _Status),
    "version_of": ctypes.CFUNCTYPE(None, c_void_p, c_uint32, POINTER(c_uint64), _Status),
    "live_rows": ctypes.CFUNCTYPE(None, c_void_p, c_uint32, POINTER(c_uint64), _Status),
    "last_error": ctypes.CFUNCTYPE(None, c_void_p, POINTER(c_char), c_uint64, _Status),
}


class ContractView(ctypes.Structure):
    """`flashrt_contract`."""

    _fields_: ClassVar[Fields] = [
        ("abi_version", c_uint32),
        ("struct_size", c_uint32),
        ("name", c_char_p),
        ("fingerprint", c_char_p),
        ("device_type", c_uint32),
        ("device_index", c_uint32),
        ("stream", c_void_p),
        ("buffers", POINTER(BufferView)),
        ("stages", POINTER(StageView)),
        ("regions", POINTER(RegionView)),
        ("buffer_count", c_uint32),
        ("stage_count", c_uint32),
        ("region_count", c_uint32),
        ("reserved", c_uint32),
        ("context", c_void_p),
        *CALLBACKS.items(),
    ]
