"""Swap windows: the host's side of the buffers that it fills and reads."""

from __future__ import annotations

import numpy as np
import torch

from ..contract import Buffer, Contract, Role
from .arena import Arena
from .dtypes import TORCH_DTYPE
from .errors import WindowError


class Window:
    """One swap window: host memory at a fixed address, and the way to the device.

    On a CPU the host memory is the arena itself. On a GPU it is pinned, and `upload` and `download` each enqueue one
    asynchronous copy on the current stream.
    """

    def __init__(self, buffer: Buffer, device_tensor: torch.Tensor) -> None:
        self.buffer = buffer
        self._device_tensor = device_tensor
        self.in_place = device_tensor.device.type == "cpu"
        self.tensor = device_tensor if self.in_place else _pinned_like(buffer)
        self.array: np.ndarray = self.tensor.numpy()
        self._outdated = False
        self._uploaded = None if self.in_place else torch.cuda.Event()  # type: ignore[no-untyped-call]

    def upload(self, rows: int) -> None:
        """Send the first `rows` rows to the device."""
        if self._uploaded is not None:
            self._device_tensor[:rows].copy_(self.tensor[:rows], non_blocking=True)
            self._uploaded.record()

    def wait(self) -> None:
        """Block until the last upload has left host memory, so that it may be overwritten."""
        if self._uploaded is not None:
            self._uploaded.synchronize()

    def mark_outdated(self) -> None:
        """The device's side was changed by a restore; the host's side follows when it is next edited."""
        self._outdated = not self.in_place

    def refresh(self) -> None:
        """Bring the host's side up to date before a part of it is edited."""
        if self._outdated:
            self.download()

    def download(self) -> None:
        """Bring the window's content to host memory and wait for it."""
        if not self.in_place:
            self.tensor.copy_(self._device_tensor, non_blocking=True)
            torch.cuda.current_stream(self._device_tensor.device).synchronize()
            self._outdated = False

    def read(self) -> np.ndarray:
        """A copy of the window's content."""
        self.download()
        return self.array.copy()


class Filling:
    """A window that is being written in place, and how many of its rows are.

    Args:
        rows: rows of axis 0 to send to the device; all by default. WindowError if the window has fewer.
    """

    def __init__(self, window: Window, rows: int | None = None) -> None:
        self._window = window
        self.rows = len(window.array) if rows is None else rows

    @property
    def rows(self) -> int:
        """Rows of axis 0 that the writer fills; setting a count that the window does not have is a WindowError."""
        return self._rows

    @rows.setter
    def rows(self, count: int) -> None:
        capacity = len(self._window.array)
        if not 0 < count <= capacity:
            name = self._window.buffer.name
            raise WindowError(f"window '{name}' has {capacity} rows, cannot fill {count}; fill 1 to {capacity}")
        self._rows = count

    @property
    def array(self) -> np.ndarray:
        """The host memory of those rows, to be written."""
        return self._window.array[: self._rows]


def open_windows(contract: Contract, arena: Arena) -> dict[str, Window]:
    """A Window for every SWAP buffer of `contract`."""
    return {b.name: Window(b, arena[b.name]) for b in contract.buffers if b.role is Role.SWAP}


def checked(window: Window, value: np.ndarray) -> np.ndarray:
    """Return `value` if its dtype and shape are those of `window`; WindowError otherwise."""
    expected, got = window.array, np.asarray(value)
    if got.dtype != expected.dtype or got.shape != expected.shape:
        raise WindowError(
            f"window '{window.buffer.name}' holds {expected.dtype}{list(expected.shape)}, "
            f"got {got.dtype}{list(got.shape)}"
        )
    return got


def host_copy(tensor: torch.Tensor) -> np.ndarray:
    """A host copy of `tensor`; bfloat16 and float8 as float32, because numpy has neither."""
    if tensor.dtype in (torch.bfloat16, torch.float8_e4m3fn):
        tensor = tensor.float()
    host: np.ndarray = tensor.cpu().numpy().copy()
    return host


def _pinned_like(buffer: Buffer) -> torch.Tensor:
    return torch.zeros(buffer.shape, dtype=TORCH_DTYPE[buffer.dtype], pin_memory=True)
