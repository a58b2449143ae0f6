"""A policy node in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

from lifecycle_msgs.srv import ChangeState, GetState

from flashrt_ros.node.demo.shared_memory import mapped_segments, remove_segments
from test.node.rig import PROBE, Rig, wait_until
from test.sources import ROOT, checkout_environment


class NodeProcess:
    """`policy_node` with the probe policy and `parameters`, in the rig's domain; killed at the end of the test."""

    def __init__(self, rig: Rig, parameters: dict[str, Any] | None = None) -> None:
        self._rig = rig
        self._segments: set[str] = set()
        arguments = ["--ros-args", "-r", "__node:=policy"]
        for name, value in {**PROBE, **(parameters or {})}.items():
            arguments += ["-p", f"{name}:={str(value).lower() if isinstance(value, bool) else value}"]
        environment = {**checkout_environment(), "ROS_DOMAIN_ID": str(rig.domain)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "test.node.probe_main", *arguments],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        rig.at_end(self._kill)

    def state(self) -> str:
        """The lifecycle state, asked by the service."""
        return str(self._rig.call(GetState, "policy/get_state", GetState.Request(), timeout=60).current_state.label)

    def change(self, label: str) -> bool:
        """Ask for a transition by the service."""
        request = ChangeState.Request()
        request.transition.label = label
        return bool(self._rig.call(ChangeState, "policy/change_state", request, retry=False, timeout=60).success)

    def wait_for_state(self, label: str) -> None:
        """Wait until the node is in state `label`."""
        wait_until(lambda: self.state() == label, f"the node is {label}", timeout=60)

    def end(self, number: int, limit: float) -> tuple[int, float, str]:
        """Send a signal and wait; exit code, seconds that it took, and all output."""
        self._segments |= mapped_segments(self.process.pid)  # a process that leaves a thread behind leaves these too
        began = time.monotonic()
        self.process.send_signal(number)
        output, _ = self.process.communicate(timeout=limit)
        return self.process.returncode, time.monotonic() - began, output

    def _kill(self) -> None:
        if self.process.poll() is None:
            self._segments |= mapped_segments(self.process.pid)
            self.process.kill()
            self.process.communicate(timeout=10)
        remove_segments(self._segments)
