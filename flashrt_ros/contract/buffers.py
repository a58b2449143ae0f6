"""Buffers: named memory of a fixed shape, with one role each."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import Enum, IntEnum

from .errors import ContractError

_NAME = re.compile(r"[a-z][a-z0-9_.]*")


class Role(Enum):
    """What a buffer is for; it decides who may write it and whether a capsule saves it."""

    STATIC = "static"  # prepared by a checkpoint or prompt stage, read-only in the hot loop
    SWAP = "swap"  # a window that the host fills (it has a rate) or reads (a stage writes it)
    STATE = "state"  # written by one stage, read by later ones, saved by capsules
    SCRATCH = "scratch"  # private to the stage that writes it; its content is worthless afterwards


class Rate(IntEnum):
    """How often a value changes, slowest first."""

    CHECKPOINT = 0
    PROMPT = 1
    OBSERVATION = 2
    STEP = 3


class DType(Enum):
    """Element types, by the name that numpy, torch and safetensors share."""

    UINT8 = "uint8"
    INT32 = "int32"
    INT64 = "int64"
    FLOAT8_E4M3 = "float8_e4m3fn"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]


_ITEMSIZE = {
    DType.UINT8: 1,
    DType.INT32: 4,
    DType.INT64: 8,
    DType.FLOAT8_E4M3: 1,
    DType.FLOAT16: 2,
    DType.BFLOAT16: 2,
    DType.FLOAT32: 4,
}


def checked_name(kind: str, name: str) -> str:
    """Return `name`; raise ContractError unless it is lower case letters, digits, `_` and `.`."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ContractError(
            f"{kind} name {name!r} is not allowed: start with a letter, then use a-z, 0-9, '_' and '.' only"
        )
    return name


@dataclass(frozen=True)
class Buffer:
    """One named piece of the arena.

    `rate` belongs to windows that the host fills: it says how often. Every other buffer changes as often as the
    stages that write it, so giving it a rate is an error.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    role: Role
    rate: Rate | None = None
    doc: str = ""

    def __post_init__(self) -> None:
        checked_name("buffer", self.name)
        object.__setattr__(self, "shape", tuple(self.shape))
        if not self.shape or any(not isinstance(n, int) or n <= 0 for n in self.shape):
            raise ContractError(f"buffer '{self.name}': shape {self.shape} needs one or more positive integers")
        if self.rate is not None and self.role is not Role.SWAP:
            raise ContractError(
                f"buffer '{self.name}': only a SWAP window that the host fills has a rate, this one is {self.role.name}"
            )

    @property
    def nbytes(self) -> int:
        """Bytes that the buffer occupies, without alignment."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def filled_by_host(self) -> bool:
        """True for a window that the host fills."""
        return self.role is Role.SWAP and self.rate is not None
