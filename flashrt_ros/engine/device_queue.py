"""What a session enqueues on its GPU, and what of it is known to be done."""

from __future__ import annotations

import torch

from .driver import current_stream, driver

Mark = tuple[int, int]
"""A place in a stream: its handle, and a number that rises with every mark."""
NOWHERE: Mark = (0, 0)
"""A mark behind which nothing was enqueued, so that nobody waits for it."""


class DeviceQueue:
    """torch's current stream on one GPU, with as little as possible between the host and the driver.

    It remembers how far the host has seen each stream done, so that a wait for something earlier asks nobody.

    Args:
        device: with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._index = device.index
        self._driver = driver()
        self._marks = 0
        self._done: dict[int, int] = {}

    def upload(self, target: int, source: int, nbytes: int) -> None:
        """Enqueue a copy from page-locked host memory; DriverError if that is refused, as of all methods here."""
        stream, copy = current_stream(self._index), self._driver.upload
        if copy(target, source, nbytes, stream):
            self._driver.again("an upload", self.device, lambda: copy(target, source, nbytes, stream))

    def download(self, target: int, source: int, nbytes: int) -> None:
        """Enqueue a copy to page-locked host memory."""
        stream, copy = current_stream(self._index), self._driver.download
        if copy(target, source, nbytes, stream):
            self._driver.again("a download", self.device, lambda: copy(target, source, nbytes, stream))

    def new_event(self) -> torch.cuda.Event:
        """An event that has happened."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))  # it has no handle before
        return event

    def mark(self, event: int) -> Mark:
        """Let the event of this handle happen when all that was enqueued so far is done."""
        stream, record = current_stream(self._index), self._driver.record
        if record(event, stream):
            self._driver.again("an event", self.device, lambda: record(event, stream))
        self._marks += 1
        return stream, self._marks

    def is_done(self, mark: Mark) -> bool:
        """Whether the host knows already that `mark` was reached; it may have been reached without."""
        stream, number = mark
        return number <= self._done.get(stream, 0)

    def finish(self) -> None:
        """Wait until the device has done all that was enqueued on the current stream."""
        stream, marks = current_stream(self._index), self._marks
        wait = self._driver.finish
        if wait(stream):
            self._driver.again("to finish", self.device, lambda: wait(stream))
        self._done[stream] = marks
