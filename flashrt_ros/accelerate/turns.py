"""One caller at a time for something that owns fixed memory, across threads and across streams of a GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Turns:
    """Calls through `turn` exclude each other, also where another stream still works on an earlier call."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._done = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Within the block nobody else has a turn."""
        with self._lock:
            if self._done is None:
                yield
                return
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(self._done)
            yield
            self._done.record(stream)
