"""One caller at a time for something that owns fixed memory, across threads and across streams of a GPU."""

from __future__ import annotations

import threading
from types import TracebackType

import torch


class Turns:
    """`with turns:` blocks exclude each other, also where another stream still works on an earlier one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._done = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            if self._done is not None:
                torch.cuda.current_stream(self._device).wait_event(self._done)
        except BaseException:
            self._lock.release()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._done is not None:
                self._done.record(torch.cuda.current_stream(self._device))
        finally:
            self._lock.release()
