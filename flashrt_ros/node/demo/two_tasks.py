"""Switches a running policy node between two tasks: first by instructions, then by capsules, and says what each took.

Run: `ros2 launch flashrt_ros two_tasks.launch.py`, or beside any active node `ros2 run flashrt_ros demo_two_tasks`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.qos import QoSProfile, ReliabilityPolicy
from std_msgs.msg import String

from ...msg import ActionChunk, CapsuleResult
from ...srv import Restore, Snapshot
from .errors import DemoError
from .publishing import publishing_node
from .scene import INSTRUCTIONS

_RELIABLE = QoSProfile(depth=1, reliability=ReliabilityPolicy.RELIABLE)
_LIMIT = 60.0  # seconds that anything may take


class TaskSwitcher:
    """A client that asks, and waits for the first chunk of the epoch that this begins."""

    def __init__(self, node: Node, stopped: Callable[[], bool]) -> None:
        self._node, self._stopped = node, stopped
        self._executor = SingleThreadedExecutor(context=node.context)
        self._executor.add_node(node)
        self._chunk: Any = None
        node.create_subscription(ActionChunk, "action_chunk", self._on_chunk, _RELIABLE)
        self._instruct = node.create_publisher(String, "instruction", _RELIABLE)
        self._snapshot = node.create_client(Snapshot, "snapshot")
        self._restore = node.create_client(Restore, "restore")

    def close(self) -> None:
        """Let go of the node."""
        self._executor.shutdown()
        self._executor.remove_node(self._node)

    def wait_for_the_node(self) -> None:
        """Until the node serves capsules and listens for instructions."""
        self._until(
            lambda: self._snapshot.service_is_ready() and self._instruct.get_subscription_count() > 0,
            "no policy node serves /snapshot; start one, or remap",
        )

    def instruct(self, text: str) -> tuple[float, float]:
        """Give an instruction; (ms to its first chunk, ms that its decision took)."""
        start = time.monotonic()
        self._instruct.publish(String(data=text))
        self._until(lambda: self._chunk is not None and self._chunk.instruction == text, f"no chunk follows '{text}'")
        return self._times(start)

    def snapshot(self, name: str) -> None:
        """Save the live task."""
        self._call(self._snapshot, Snapshot.Request(name=name, replace=True))

    def restore(self, name: str) -> tuple[float, float]:
        """Go back to a saved task; (ms to its first chunk, ms that its decision took)."""
        start = time.monotonic()
        epoch = self._call(self._restore, Restore.Request(name=name)).epoch
        self._until(lambda: self._chunk is not None and self._chunk.epoch >= epoch, f"no chunk continues from '{name}'")
        return self._times(start)

    def _on_chunk(self, chunk: Any) -> None:
        self._chunk = chunk

    def _times(self, start: float) -> tuple[float, float]:
        took = self._chunk.inference_duration
        return (time.monotonic() - start) * 1e3, took.sec * 1e3 + took.nanosec / 1e6

    def _call(self, client: Any, request: Any) -> Any:
        future = client.call_async(request)
        self._until(future.done, f"{client.srv_name} did not answer")
        answer = future.result()
        if answer.result.cause != CapsuleResult.SUCCESS:
            raise DemoError(f"{client.srv_name}: {answer.result.message}")
        return answer

    def _until(self, condition: Callable[[], bool], failure: str) -> None:
        deadline = time.monotonic() + _LIMIT
        while not condition():
            if self._stopped():
                raise KeyboardInterrupt
            if time.monotonic() > deadline:
                raise DemoError(f"{failure} (waited {_LIMIT:.0f} s)")
            self._executor.spin_once(timeout_sec=0.02)


def switch_tasks(switcher: TaskSwitcher, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Do both tasks in turn, `rounds` times by instruction and then by capsule; the times of every switch."""
    times: dict[str, list[tuple[float, float]]] = {"by instruction": [], "by capsule": []}
    for number in range(2 * rounds):
        task = number % 2
        times["by instruction"].append(switcher.instruct(INSTRUCTIONS[task]))
        switcher.snapshot(f"task_{task}")
    for number in range(2 * rounds):
        times["by capsule"].append(switcher.restore(f"task_{number % 2}"))
    return times


def main(argv: Sequence[str] | None = None) -> int:
    """Switch, print a table, and end; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="how often each task is taken up in each way")
    args, _ = parser.parse_known_args(argv)
    try:
        with publishing_node("two_tasks") as (node, stop):
            switcher = TaskSwitcher(node, stop.is_set)
            try:
                switcher.wait_for_the_node()
                times = switch_tasks(switcher, args.rounds)
            finally:
                switcher.close()
    except DemoError as error:
        print(f"two_tasks: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0
    print("switch           to the first chunk   its decision   (medians)")
    for way, pairs in times.items():
        waited, decided = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"{way:<15}  {waited:14.1f} ms  {decided:10.1f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
