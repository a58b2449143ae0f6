"""What the demo's own publishers share: a node without signal handlers of rclpy's, and a steady pace."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import rclpy
from rclpy.node import Node
from rclpy.signals import SignalHandlerOptions

from ..stop_signal import StopSignal


@contextmanager
def publishing_node(name: str) -> Iterator[tuple[Node, StopSignal]]:
    """Yield a node that only publishes, so nothing needs to spin, and what SIGINT and SIGTERM set."""
    stop = StopSignal()
    # rclpy's own handlers invalidate the context under a running loop.
    rclpy.init(signal_handler_options=SignalHandlerOptions.NO)
    node = Node(name)
    try:
        yield node, stop
    finally:
        node.destroy_node()
        rclpy.try_shutdown()


def keep_pace(rate: float, stop: StopSignal, publish: Callable[[float], None]) -> None:
    """Call `publish(seconds since start)` at `rate` Hz until `stop`; a late call is made up for by skipping."""
    start = time.monotonic()
    tick = 0
    while not stop.is_set():
        publish(time.monotonic() - start)
        tick = max(tick + 1, int((time.monotonic() - start) * rate))
        stop.wait(max(0.0, start + tick / rate - time.monotonic()))
