"""Capsules: the live state of a session at a stage boundary."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from ..contract import Contract
from .errors import CapsuleNameError
from .layout import Layout
from .versions import LedgerState

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class Tier(StrEnum):
    """Where the bytes of a capsule are."""

    DEVICE = "device"
    HOST = "host"


@dataclass(slots=True)  # made in half the time of a named tuple, when code is cold
class SessionState:
    """Everything about a session that is not in its regions. Nobody changes it.

    `unfilled` names the input windows that had to be filled before a stage might read them. They still have to be after
    a restore, whatever they hold then.
    """

    ledger: LedgerState
    extents: Mapping[str, int]
    generator: torch.Tensor
    notes: Mapping[str, str]
    unfilled: frozenset[str]


NOTHING_AWAITED: frozenset[str] = frozenset()
"""The `unfilled` of most states."""


@dataclass(slots=True)
class Capsule:
    """One saved state: a description, the session's state, and the packed live bytes of its regions.

    The bytes arrive in the order of the stream that the session was on. `copied` tells a host when they are in pinned
    memory; None where no copy of that kind is under way. `last_use` is a number of the store's, which rises.
    """

    name: str
    contract: Contract
    state: SessionState
    layout: Layout
    block: torch.Tensor
    tier: Tier
    description: str = ""
    keep: bool = False
    created_ns: int = field(default_factory=time.time_ns)
    copied: torch.cuda.Event | None = None
    last_use: int = field(default=0, compare=False)

    def host_bytes(self) -> torch.Tensor:
        """uint8[nbytes] in host memory, after waiting for them; the block itself if that is where it lies."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.block.cpu()

    @property
    def nbytes(self) -> int:
        """Live bytes, packed."""
        return self.layout.nbytes

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the contract that the capsule was saved under."""
        return self.contract.fingerprint

    @property
    def notes(self) -> Mapping[str, str]:
        """The session's notes at the moment of saving (instruction, identity of the observation)."""
        return self.state.notes


@dataclass
class Parked:
    """What a session that shares its buffers holds while another one is resident. The block fits every extent."""

    block: torch.Tensor
    state: SessionState | None = None
    layout: Layout | None = None

    def copy(self) -> Parked:
        """An independent twin."""
        return Parked(self.block.clone(), self.state, self.layout)


def checked_capsule_name(name: str) -> str:
    """Return `name`; CapsuleNameError unless it is safe as a file name and fits the services' rule."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise CapsuleNameError(
            f"capsule name {name!r} is not allowed: use 1 to 64 of a-z, A-Z, 0-9, '_', '-', '.', "
            "beginning with a letter or a digit"
        )
    return name
