"""Python's handle on test/engine/cview_client.c, loaded into this process."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int32, c_uint8, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from flashrt_ros.engine import CView, Session
from flashrt_ros.engine.cabi import Status

SOURCE = Path(__file__).with_name("cview_client.c")
_FUNCTIONS: dict[str, list[Any]] = {
    "decide": [c_void_p, c_void_p, c_uint64, c_void_p, c_uint64],
    "decide_in_a_thread": [c_void_p, c_void_p, c_uint64, c_void_p, c_uint64],
    "act_after_ctrl_c": [c_void_p],
    "read_live": [c_void_p, c_char_p, c_void_p, POINTER(c_uint64)],
    "check": [c_void_p, c_uint32],
    "find_buffer": [c_void_p, c_char_p, POINTER(c_uint32)],
    "find_region": [c_void_p, c_char_p, POINTER(c_uint32)],
    "begin_fill": [c_void_p, c_uint32, POINTER(c_void_p)],
    "filled": [c_void_p, c_uint32, c_uint64],
    "draw": [c_void_p, c_uint32],
    "act": [c_void_p],
    "read": [c_void_p, c_uint32, c_uint64, c_uint64, c_void_p],
    "version_of": [c_void_p, c_uint32, POINTER(c_uint64)],
    "live_rows": [c_void_p, c_uint32, POINTER(c_uint64)],
    "last_error": [c_void_p, c_char_p, c_uint64],
}


class Client:
    """The client's functions, with their C types. Statuses come back as `Status`, so an unknown one is an error."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        for name, arguments in _FUNCTIONS.items():
            function = getattr(self._library, f"client_{name}")
            function.argtypes, function.restype = arguments, c_int32
        self._library.client_describe.argtypes = [c_void_p, c_char_p, c_uint64]
        self._library.client_describe.restype = None

    def call(self, name: str, address: int | None, *arguments: Any) -> Status:
        """Call one function with the address of a contract, or NULL."""
        return Status(getattr(self._library, f"client_{name}")(address, *arguments))

    def describe(self, address: int) -> list[str]:
        """The plan as the client sees it, a line an item."""
        text = ctypes.create_string_buffer(1 << 16)
        self._library.client_describe(address, text, len(text))
        return text.value.decode().splitlines()


class Driver:
    """A client that drives one session through a view, buffers by name."""

    def __init__(self, client: Client, session: Session) -> None:
        self.client, self.session, self.view = client, session, CView(session)

    def call(self, name: str, *arguments: Any) -> Status:
        return self.client.call(name, self.view.address, *arguments)

    def index(self, buffer: str) -> int:
        found = c_uint32()
        assert self.call("find_buffer", buffer.encode(), found) is Status.OK
        return found.value

    def begin_fill(self, buffer: str) -> tuple[Status, int | None]:
        address = c_void_p()
        return self.call("begin_fill", self.index(buffer), address), address.value

    def filled(self, buffer: str, rows: int) -> Status:
        return self.call("filled", self.index(buffer), rows)

    def fill(self, buffer: str, value: np.ndarray) -> Status:
        """Write all of `value` to the head of the window in place and notify."""
        status, address = self.begin_fill(buffer)
        if status is not Status.OK:
            return status
        assert address is not None
        ctypes.memmove(address, value.ctypes.data, value.nbytes)
        return self.filled(buffer, len(value))

    def act(self) -> Status:
        return self.call("act")

    def version(self, buffer: str) -> int:
        version = c_uint64()
        assert self.call("version_of", self.index(buffer), version) is Status.OK
        return version.value

    def read(self, buffer: str, offset: int, nbytes: int) -> tuple[Status, bytes]:
        target = (c_uint8 * max(nbytes, 1))()
        return self.call("read", self.index(buffer), offset, nbytes, target), bytes(target)[:nbytes]

    def read_all(self, buffer: str) -> bytes:
        nbytes = self.session.contract.buffer(buffer).nbytes
        status, raw = self.read(buffer, 0, nbytes)
        assert status is Status.OK, self.message()
        return raw

    def decide(self, pixels: np.ndarray, function: str = "decide") -> tuple[Status, np.ndarray]:
        actions = np.zeros(4, np.float32)
        data, count = pixels.ctypes.data, len(pixels)
        return self.call(function, data, count, actions.ctypes.data, len(actions)), actions

    def message(self, capacity: int = 1000) -> str:
        text = ctypes.create_string_buffer(capacity)
        assert self.call("last_error", text, capacity) is Status.OK
        return text.value.decode()
