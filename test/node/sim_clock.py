"""A simulated clock for tests: `/clock` at 100 Hz, which can jump."""

from __future__ import annotations

import threading
import time

from rclpy.time import Time
from rosgraph_msgs.msg import Clock

from test.node.rig import Rig


class SimClock:
    """Publishes from construction to the end of the test.

    Args:
        rig: of the test.
        start: first time (s).
    """

    def __init__(self, rig: Rig, start: float) -> None:
        self._publisher = rig.node.create_publisher(Clock, "/clock", 1)
        self._stop = threading.Event()
        self.jump_to(start)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        rig.at_end(self._close)

    def now_ns(self) -> int:
        """The simulated time."""
        return self._origin_ns + time.monotonic_ns()

    def jump_to(self, seconds: float) -> None:
        """Set the time."""
        self._origin_ns = round(seconds * 1e9) - time.monotonic_ns()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._publisher.publish(Clock(clock=Time(nanoseconds=self.now_ns()).to_msg()))
            self._stop.wait(0.01)

    def _close(self) -> None:
        self._stop.set()
        self._thread.join(5)
