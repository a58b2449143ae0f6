"""The demo's ROS graph: two cameras, a robot and the policy node in processes, and the operator in this one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .errors import DemoError
from .network import child_environment, own_domain, ros_environment
from .operator_node import Operator
from .processes import Processes
from .recording import Recording, Status
from .scene import CAMERAS, INSTRUCTIONS
from .share import share_file

POLICY_NODE = "policy"
START_LIMIT = 180.0  # seconds from starting the processes until something came from each; a checkpoint loads meanwhile
STATUS_LIMIT = 10.0  # seconds between two statuses
_SLICE = 0.1  # seconds between two looks at the children and at the caller's wishes


@dataclass(frozen=True)
class Graph:
    """A running graph.

    Attributes:
        tend: called about ten times a second while the graph is spun; what it raises ends the graph.
    """

    processes: Processes
    operator: Operator
    tend: Callable[[], None]

    @property
    def recording(self) -> Recording:
        """What arrived so far."""
        return self.operator.recording

    def step(self) -> None:
        """Receive for a moment; DemoError if a process has ended by itself."""
        self.operator.spin(_SLICE)
        self.tend()
        self.processes.check()

    def begin(self) -> None:
        """Give the first instruction, wait until something came from every process, and start the recording."""
        start = time.monotonic()
        told = 0
        while not self.operator.sees_everything:
            waited = time.monotonic() - start
            if waited > START_LIMIT:
                raise DemoError(_nothing_text(self.recording))
            if self.operator.failed_transitions:
                raise DemoError(f"the policy node could not start: {self.operator.failed_transitions[0]}")
            # Once a second: the node may not have discovered this publisher yet, and a volatile message is not kept.
            if self.operator.is_heard and waited >= told:
                told = int(waited) + 1
                self.operator.instruct(INSTRUCTIONS[0])
            self.step()
        self._wait_for_status(self.recording.status)
        self.recording.begin(time.time_ns())

    def finish(self) -> None:
        """Wait for a status that counts every chunk that has arrived."""
        last = max((chunk.chunk_id for chunk in self.recording.chunks), default=0)
        while self.recording.status is None or self.recording.status.chunks_published < last:
            self._wait_for_status(self.recording.status)

    def run_for(self, seconds: float) -> None:
        """Begin, receive for so long, and finish."""
        self.begin()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.step()
        self.finish()

    def _wait_for_status(self, before: Status | None) -> None:
        """Wait for another status than `before`."""
        deadline = time.monotonic() + STATUS_LIMIT
        while self.recording.status is before:
            if time.monotonic() > deadline:
                raise DemoError(f"the policy node published no status for {STATUS_LIMIT:.0f} s")
            self.step()


@contextmanager
def running_graph(
    logs: Path,
    tend: Callable[[], None],
    params: Path | None = None,
    overrides: Mapping[str, object] | None = None,
    camera_arguments: Sequence[str] = (),
) -> Iterator[Graph]:
    """Start everything, yield it, and leave neither processes nor shared memory behind.

    Args:
        logs: folder of one log a process.
        tend: see `Graph.tend`.
        params: parameter file of the policy node; None: config/pi05_tiny.yaml.
        overrides: parameters of the policy node that override the file.
        camera_arguments: more arguments for the camera processes.
    """
    params_file = params or share_file("config/pi05_tiny.yaml")
    if not params_file.is_file():
        raise DemoError(f"the parameter file {params_file} does not exist")
    with own_domain() as domain:
        ros = ros_environment(domain, share_file("config/fastdds.xml"), logs)
        os.environ.update(ros)  # for the operator, which lives in this process
        with Processes(child_environment(ros), logs) as processes:
            _start(processes, params_file, {"autostart": True, **(overrides or {})}, camera_arguments)
            with Operator(POLICY_NODE) as operator:
                yield Graph(processes, operator, tend)


def _start(
    processes: Processes, params: Path, overrides: Mapping[str, object], camera_arguments: Sequence[str]
) -> None:
    arguments = ["--ros-args", "-r", f"__node:={POLICY_NODE}", "--params-file", str(params)]
    for name, value in overrides.items():
        arguments += ["-p", f"{name}:={str(value).lower() if isinstance(value, bool) else value}"]
    processes.start("policy", "flashrt_ros.node.main", arguments)
    for camera in CAMERAS:
        processes.start(f"camera_{camera.view}", "flashrt_ros.node.demo.camera", (camera.view, *camera_arguments))
    processes.start("robot", "flashrt_ros.node.demo.robot")


def _nothing_text(recording: Recording) -> str:
    missing = [f"frame of camera '{camera.view}'" for camera in CAMERAS if camera.view not in recording.frames]
    missing += ["joint state"] if not recording.positions else []
    missing += ["action chunk"] if not recording.chunks else []
    status = recording.status
    node = f"the policy node is {status.state}: {status.reason}" if status else "the policy node published no status"
    return f"no {', no '.join(missing)} within {START_LIMIT:.0f} s; {node}"
