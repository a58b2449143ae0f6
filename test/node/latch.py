"""A latch that holds the probe policy inside a replay for as long as a test wants."""

from __future__ import annotations

import threading


class Latch:
    """Open, it lets replays through. Closed, a replay sets `entered` and waits until the latch opens."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._may_pass = threading.Event()
        self._may_pass.set()

    def close(self) -> None:
        """Hold the next replay."""
        self.entered.clear()
        self._may_pass.clear()

    def open(self) -> None:
        """Let it go on."""
        self._may_pass.set()

    def pass_through(self) -> None:
        """Called by the policy, within a replay."""
        if not self._may_pass.is_set():
            self.entered.set()
            self._may_pass.wait(30)


LATCH = Latch()
