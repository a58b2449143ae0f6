"""A ROS graph for one test: own context, own domain, executors in threads, and an orderly end."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import rclpy
from rcl_interfaces.msg import Log
from rclpy.context import Context
from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor
from rclpy.node import Node
from rclpy.parameter import Parameter
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy

import flashrt_ros.policies
from flashrt_ros.msg import ActionChunk, EngineStatus
from flashrt_ros.node.policy_node import PolicyNode

T = TypeVar("T")

DEADLINE = 15.0
PROBE: dict[str, Any] = {
    "policy.name": "probe",
    "rate_hz": 20.0,
    "warmup": 1,
    "status_period": 0.1,
    "instruction": "go on",
}

POLICIES = Path(__file__).parent / "policies"
if str(POLICIES) not in flashrt_ros.policies.__path__:
    flashrt_ros.policies.__path__.append(str(POLICIES))


def wait_until(condition: Callable[[], T], what: str, timeout: float = DEADLINE) -> T:
    """Poll until `condition()` is true and return its value; the test fails, saying `what`, at the deadline."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {what}"
        time.sleep(0.005)
    return value


class Spinner:
    """An executor in a thread."""

    def __init__(self, context: Context) -> None:
        self.executor = SingleThreadedExecutor(context=context)
        self.errors: list[BaseException] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._spin, daemon=True)
        self._thread.start()

    def _spin(self) -> None:
        while not self._stop.is_set():
            try:
                self.executor.spin_once(timeout_sec=0.05)
            except ExternalShutdownException:
                return
            except Exception as error:
                self.errors.append(error)

    def stop(self) -> None:
        """End the thread, then the executor."""
        self._stop.set()
        self._thread.join(10)
        assert not self._thread.is_alive(), "the executor's thread hangs"
        self.executor.shutdown()


class Rig:
    """One graph. `node` is the test's own node; `policy` starts a policy node that an executor of its own spins."""

    def __init__(self, domain: int) -> None:
        self.domain = domain
        self.context = Context()
        rclpy.init(context=self.context, domain_id=domain)
        self._spinners: list[Spinner] = []
        self._nodes: list[Node] = []
        self._closers: list[Callable[[], None]] = []
        self.node = self.add(Node("tester", context=self.context))

    def add(self, node: Node) -> Node:
        """Spin `node` in a thread of its own until the end of the test."""
        spinner = Spinner(self.context)
        spinner.executor.add_node(node)
        self._spinners.append(spinner)
        self._nodes.append(node)
        return node

    def policy(self, parameters: dict[str, Any] | None = None, name: str = "policy", **options: Any) -> PolicyNode:
        """A policy node with these parameters, unconfigured."""
        overrides = [Parameter(key, value=value) for key, value in (parameters or {}).items()]
        node = PolicyNode(name, context=self.context, parameter_overrides=overrides, **options)
        self.add(node)
        return node

    def active_policy(self, parameters: dict[str, Any] | None = None, **options: Any) -> PolicyNode:
        """An active node with the probe policy, a quick rate and an instruction, unless `parameters` say otherwise."""
        node = self.policy({**PROBE, **(parameters or {})}, **options)
        assert node.transition("configure"), "configure failed; the log says why"
        assert node.transition("activate"), "activate failed; the log says why"
        return node

    def in_background(self, action: Callable[[], object]) -> None:
        """Do `action` in a thread that ends before the graph goes down."""
        thread = threading.Thread(target=action, daemon=True)
        thread.start()
        self._closers.append(lambda: thread.join(DEADLINE))

    @staticmethod
    def parameter(name: str, value: Any) -> Parameter:
        """A parameter to set on a node."""
        return Parameter(name, value=value)

    @staticmethod
    def quiet(recorder: Recorder, seconds: float = 0.2) -> bool:
        """Whether nothing came for some time."""
        count = len(recorder)
        time.sleep(seconds)
        return len(recorder) == count

    def at_end(self, close: Callable[[], None]) -> None:
        """Call `close` before the graph goes down."""
        self._closers.append(close)

    def call(self, kind: Any, name: str, request: Any, timeout: float = DEADLINE, retry: bool = True) -> Any:
        """Call a service and wait for its answer.

        Args:
            kind: of service.
            name: of service.
            request: to send.
            timeout: to find the service, and again to get the answer (s).
            retry: send the request again if nothing came for 2 s, since the first call to a new service may get lost.
        """
        client = self.node.create_client(kind, name)
        self._closers.append(lambda: self.node.destroy_client(client))
        wait_until(client.service_is_ready, f"service {name}", timeout)
        if not retry:
            time.sleep(0.3)
            return self._answer(client, request, name, timeout)
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            with contextlib.suppress(AssertionError):
                return self._answer(client, request, name, min(2.0, timeout))
        raise AssertionError(f"no answer of {name} within {timeout:g} s")

    def _answer(self, client: Any, request: Any, name: str, timeout: float) -> Any:
        future = client.call_async(request)
        wait_until(future.done, f"answer of {name}", timeout)
        return future.result()

    def close(self) -> None:
        """Everything down, in the order that rclpy survives; exceptions that left an executor fail the test."""
        errors = self._take_down()
        # A node lives in the middleware until the last reference is gone, and takes the log of the next node of its
        # name with it when it goes.
        gc.collect()
        assert not errors, f"exceptions left an executor: {errors}"

    def _take_down(self) -> list[BaseException]:
        for close in reversed(self._closers):
            close()
        for spinner in self._spinners:
            spinner.stop()
        for node in reversed(self._nodes):
            node.destroy_node()
        errors = [error for spinner in self._spinners for error in spinner.errors]
        self._closers.clear()
        self._nodes.clear()
        self._spinners.clear()
        del self.node
        self.context.try_shutdown()
        return errors


class Recorder:
    """Everything that a topic carried."""

    def __init__(self, rig: Rig, kind: Any, topic: str, *, latched: bool = False) -> None:
        durability = DurabilityPolicy.TRANSIENT_LOCAL if latched else DurabilityPolicy.VOLATILE
        qos = QoSProfile(depth=200, reliability=ReliabilityPolicy.RELIABLE, durability=durability)
        self.messages: list[Any] = []
        self._wanted: Callable[[Any], bool] = lambda _: True
        self.subscription = rig.node.create_subscription(kind, topic, self._on_message, qos)

    def keep_only(self, wanted: Callable[[Any], bool]) -> None:
        """Forget what came, and everything to come that is not wanted."""
        self._wanted = wanted
        self.messages = [message for message in self.messages if wanted(message)]

    def _on_message(self, message: Any) -> None:
        if self._wanted(message):
            self.messages.append(message)

    def __len__(self) -> int:
        return len(self.messages)

    def wait_for(self, condition: Callable[[Any], bool], what: str, timeout: float = DEADLINE, start: int = 0) -> Any:
        """The first message from index `start` on that fulfils `condition`."""
        return wait_until(lambda: next((m for m in self.messages[start:] if condition(m)), None), what, timeout)

    def next(self, count: int = 1, timeout: float = DEADLINE) -> list[Any]:
        """The next `count` messages that come from now on."""
        start = len(self.messages)
        wait_until(lambda: len(self.messages) >= start + count, f"{count} more messages", timeout)
        return self.messages[start : start + count]


def record_chunks(rig: Rig, topic: str = "action_chunk") -> Recorder:
    """Records `action_chunk`."""
    return Recorder(rig, ActionChunk, topic)


def record_errors(rig: Rig) -> Recorder:
    """Records what nodes log as an error, on `/rosout`."""
    recorder = Recorder(rig, Log, "/rosout", latched=True)
    recorder.keep_only(lambda message: message.level >= Log.ERROR)
    return recorder


def record_status(rig: Rig, node: str = "policy") -> Recorder:
    """Records `~/status`."""
    return Recorder(rig, EngineStatus, f"{node}/status", latched=True)
