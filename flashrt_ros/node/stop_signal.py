"""A request to end that arrives as a signal."""

from __future__ import annotations

import os
import select
import signal

NUMBERS = (signal.SIGINT, signal.SIGTERM)


class StopSignal:
    """Set by SIGINT or SIGTERM from the moment it is made, in the main thread.

    A threading.Event would not do. Python runs a handler in the main thread between any two of its instructions, also
    where that thread waits for the event and holds the event's lock, or where another signal's handler is setting it:
    the handler would wait for that lock, and the process for ever.
    """

    def __init__(self) -> None:
        self._asked = False
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        for number in NUMBERS:
            signal.signal(number, self.set)

    def set(self, *_: object) -> None:
        """Ask for the end. Takes no lock, so that a handler may call it anywhere."""
        self._asked = True
        os.eventfd_write(self._wakeup, 1)

    def is_set(self) -> bool:
        """Whether somebody asked for the end."""
        return self._asked

    def wait(self, seconds: float) -> bool:
        """Wait until somebody asks, `seconds` at most; whether somebody did."""
        if not self._asked:
            select.select([self._wakeup], [], [], max(0.0, seconds))
        return self._asked
