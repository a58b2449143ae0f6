"""Waiting for a device, and who is to blame where it reports a fault."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .errors import DeviceFaultError, first_line


def finish(device: torch.device) -> None:
    """Wait until everything that was asked of `device` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def blaming(who: str, device: torch.device) -> Iterator[None]:
    """At the end of the block `device` comes to rest; DeviceFaultError that names `who` if it cannot.

    A device tells of a fault late, to whoever asks it for something next: without the rest that would be another
    candidate, or the original model.
    """
    try:
        yield
    finally:
        _demand_rest(who, device)


def _demand_rest(who: str, device: torch.device) -> None:
    try:
        finish(device)
    except RuntimeError as error:
        raise DeviceFaultError(
            f"{who} left '{device}' with a fault: {first_line(error)}. Nothing runs on it in this process any more; "
            "start again, without the kind of a candidate that is to blame ('kinds'), and report it"
        ) from error
