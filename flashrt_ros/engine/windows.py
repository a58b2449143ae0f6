"""Swap windows: the host's side of the buffers that it fills and reads."""

from __future__ import annotations

from enum import StrEnum

import numpy as np
import torch

from ..contract import Buffer, Contract, Role
from .arena import Arena
from .device_queue import NOWHERE, DeviceQueue
from .dtypes import TORCH_DTYPE
from .errors import DeviceError, WindowError


class WindowPath(StrEnum):
    """How what the host writes into a window reaches the stages."""

    HOST = "host"
    """The stages run on the host and read it where it was written."""
    PINNED = "pinned"
    """It is page-locked, and one asynchronous copy brings it to the GPU."""
    MAPPED = "mapped"
    """It is page-locked, and the GPU reads it where it was written."""


def choose_path(device: torch.device, asked: WindowPath | None = None) -> WindowPath:
    """The way of every window on `device`: as asked, or in place where host and GPU share their memory.

    Raises DeviceError if `asked` is not possible there.
    """
    if device.type == "cpu":
        if asked not in (None, WindowPath.HOST):
            raise DeviceError(f"windows cannot be {asked} on '{device}', which has no memory of its own; ask for none")
        return WindowPath.HOST
    if asked is WindowPath.HOST:
        raise DeviceError(f"windows cannot stay on the host for '{device}'; ask for pinned or mapped")
    return asked or (WindowPath.MAPPED if is_integrated(device) else WindowPath.PINNED)


def is_integrated(device: torch.device) -> bool:
    """Whether the GPU shares the host's memory, as on Jetson (CU_DEVICE_ATTRIBUTE_INTEGRATED)."""
    return bool(torch.cuda.get_device_properties(device).is_integrated)


class Window:
    """One swap window: host memory at a fixed address, and the way to the device.

    `wait` blocks until nothing on the device needs what the host wrote last: the upload of a pinned window, every
    replay so far that reads a mapped one. Copies are enqueued on the current stream.

    Args:
        stages_read: the tensor that the stages see; the host's own memory unless `path` is PINNED.
        queue: of the device; None on a CPU.
    """

    def __init__(
        self,
        buffer: Buffer,
        stages_read: torch.Tensor,
        host: torch.Tensor,
        path: WindowPath,
        queue: DeviceQueue | None = None,
    ) -> None:
        self.buffer, self.path, self.tensor = buffer, path, host
        self.in_place = path is not WindowPath.PINNED
        self.array: np.ndarray = host.numpy()
        self._device_tensor = stages_read  # kept alive, as the driver is given its address
        self._addresses = stages_read.data_ptr(), host.data_ptr()
        self._row_bytes = host[0].nbytes
        self.outdated = False
        """Set by a restore that changed the device's side; the host's side follows when it is next edited or read."""
        self._queue = queue
        self._released = NOWHERE
        if queue is not None:
            self._event = queue.new_event()
            self._event_handle = self._event.cuda_event

    def upload(self, rows: int) -> None:
        """Send the first `rows` rows to the device."""
        if self._queue is None or self.in_place:
            return
        self._queue.upload(*self._addresses, rows * self._row_bytes)
        self._released = self._queue.mark(self._event_handle)

    def mark_read(self) -> None:
        """A stage that reads host memory in place was enqueued on the current stream."""
        if self._queue is not None:
            self._released = self._queue.mark(self._event_handle)

    def wait(self) -> None:
        """Block until host memory may be overwritten."""
        if self._queue is not None and not self._queue.is_done(self._released):
            self._event.synchronize()

    def refresh(self) -> None:
        """Bring the host's side up to date before a part of it is edited."""
        if self.outdated:
            self.download()

    def download(self) -> None:
        """Bring the window's content to host memory and wait for it."""
        if self._queue is None:
            return
        if not self.in_place:
            device, host = self._addresses
            self._queue.download(host, device, self.tensor.nbytes)
            self.outdated = False
        self._queue.finish()

    def read(self) -> np.ndarray:
        """A copy of the window's content. What the host itself wrote is there without asking the device."""
        if self.buffer.filled_by_host:
            self.refresh()
        else:
            self.download()
        return self.array.copy()


class Filling:
    """A window that is being written in place, and how many of its rows are.

    Args:
        rows: rows of axis 0 to send to the device; all by default. WindowError if the window has fewer.
    """

    def __init__(self, window: Window, rows: int | None = None) -> None:
        self.window = window
        self.rows = len(window.array) if rows is None else rows

    @property
    def rows(self) -> int:
        """Rows of axis 0 that the writer fills; setting a count that the window does not have is a WindowError."""
        return self._rows

    @rows.setter
    def rows(self, count: int) -> None:
        capacity = len(self.window.array)
        if not 0 < count <= capacity:
            name = self.window.buffer.name
            raise WindowError(f"window '{name}' has {capacity} rows, cannot fill {count}; fill 1 to {capacity}")
        self._rows = count

    @property
    def array(self) -> np.ndarray:
        """The host memory of those rows, to be written."""
        return self.window.array[: self._rows]


def open_windows(contract: Contract, arena: Arena, path: WindowPath) -> dict[str, Window]:
    """A Window for every SWAP buffer of `contract`.

    Where `path` is MAPPED, stages read a window in place unless a region saves it: capsules copy within the arena, so
    the few bytes of those keep their upload.
    """
    saved = {region.buffer for region in contract.regions}
    queue = None if path is WindowPath.HOST else DeviceQueue(arena.storage.device)
    return {
        b.name: _open(b, arena, WindowPath.PINNED if path is WindowPath.MAPPED and b.name in saved else path, queue)
        for b in contract.buffers
        if b.role is Role.SWAP
    }


def _open(buffer: Buffer, arena: Arena, path: WindowPath, queue: DeviceQueue | None) -> Window:
    device_tensor = arena[buffer.name]
    if queue is None:
        return Window(buffer, device_tensor, device_tensor, path)
    host = torch.zeros(buffer.shape, dtype=TORCH_DTYPE[buffer.dtype], pin_memory=True)
    if path is WindowPath.MAPPED:
        device_tensor = _device_view(buffer, host, device_tensor.device)
        arena.place(buffer.name, device_tensor)
    return Window(buffer, device_tensor, host, path, queue)


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


def _device_view(buffer: Buffer, host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Page-locked `host` memory as a tensor on `device`, at the same address; DeviceError if the GPU cannot read it."""
    view = torch.as_tensor(_AsDeviceArray(host), device=device)
    host.view(torch.uint8).fill_(_PROBE)
    seen = bool((view.view(torch.uint8) == _PROBE).all().item()) and view.data_ptr() == host.data_ptr()
    host.zero_()
    if not seen:
        raise DeviceError(f"'{device}' cannot read window '{buffer.name}' in host memory; ask for pinned windows")
    return view


_PROBE = 0xA5


class _AsDeviceArray:
    """Page-locked memory in the words of the CUDA array interface: with unified addressing its address serves both."""

    def __init__(self, host: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {**host.numpy().__array_interface__, "version": 3, "stream": None}
        self._host = host  # lives as long as what was made of it
