"""The demo's processes: started together, watched, ended together. Imports no ROS."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from .errors import DemoError
from .shared_memory import mapped_segments, remove_segments

GRACE = 5.0  # seconds that children have to end after SIGINT before they are killed


@dataclass
class Child:
    """One process, its log and the shared memory that it was seen to use."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    segments: set[str] = field(default_factory=set)

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self.process.poll() is None

    def last_line(self) -> str:
        """The last line of the log that is not empty, without ROS's prefix."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else "its log is empty"


class Processes:
    """A context whose exit leaves no process behind, and no shared memory that no other process uses.

    Args:
        environment: of every child.
        logs: folder of one log a child; created.

    Attributes: `children`, in the order in which they were started.
    """

    def __init__(self, environment: Mapping[str, str], logs: Path) -> None:
        self._environment = dict(environment)
        self._logs = logs
        self._logs.mkdir(parents=True, exist_ok=True)
        self.children: list[Child] = []
        self._noted = 0.0

    def start(self, name: str, module: str, arguments: Sequence[str] = ()) -> None:
        """Start child `name`: the `main()` of `module`, with `arguments` as its command line."""
        log = self._logs / f"{name}.log"
        runner = (sys.executable, "-m", "flashrt_ros.node.demo.child", str(os.getpid()))
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*runner, module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                process_group=0,  # Ctrl-C reaches the parent alone, which then ends the children in order
            )
        self.children.append(Child(name, process, log))

    def pid(self, name: str) -> int:
        """Process id of child `name`."""
        return next(child.process.pid for child in self.children if child.name == name)

    def check(self) -> None:
        """Raise DemoError if a child has ended by itself; call it several times a second."""
        if time.monotonic() - self._noted >= 0.5:
            self._note_segments()
        for child in self.children:
            if not child.alive:
                code = child.process.returncode
                how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
                raise DemoError(f"process '{child.name}' {how}: {child.last_line()} (log: {child.log})")

    def _note_segments(self) -> None:
        """Remember which shared memory the children use, to remove what a killed one leaves."""
        self._noted = time.monotonic()
        for child in self.children:
            child.segments |= mapped_segments(child.process.pid)

    def stop(self) -> list[str]:
        """End every child, the latest first, and return the names of those that had to be killed.

        The parent must have left the ROS graph by now.
        """
        self._note_segments()
        for child in reversed(self.children):
            if child.alive:
                child.process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + GRACE
        killed = [child.name for child in self.children if not _wait(child, deadline)]
        remove_segments(set().union(*(child.segments for child in self.children)), disregard=os.getpid())
        self.children.clear()
        return killed

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in self.stop():
            print(f"process '{name}' did not end within {GRACE:.0f} s of SIGINT and was killed", file=sys.stderr)


def _wait(child: Child, deadline: float) -> bool:
    """Wait until `deadline`, then kill; returns whether the child ended by itself."""
    try:
        child.process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        child.process.kill()
        child.process.wait()
        return False
    return True
