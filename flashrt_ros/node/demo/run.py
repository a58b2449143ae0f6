"""The demo from start to end."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from .graph import Graph, running_graph
from .live import LiveLine, live_text, result_table
from .recording import Recording
from .report import write_report
from .scene import INSTRUCTIONS
from .summary import summarise


@dataclass(frozen=True)
class DemoOptions:
    """What a user may choose.

    Attributes:
        seconds: from when something came from every process to the end; the instruction changes half-way.
        out: folder of summary, report and logs.
        params: parameter file of the policy node; None: config/pi05_tiny.yaml.
    """

    seconds: float = 20.0
    out: Path = Path("demo_out")
    params: Path | None = None


class InterruptError(Exception):
    """A signal asked the demo to end; `number` says which."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def run_demo(options: DemoOptions) -> int:
    """Start everything, watch it, end it, and tell what was received.

    Returns:
        0, or 128 + the number of the signal that ended the demo before its time.

    Raises:
        DemoError: something could not start, a process ended by itself, or no chunk arrived.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # a log has no width; 80 columns would fold the table
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        with _flagged_signals() as flag:
            recording = _record(options, console, flag)
    except InterruptError as interrupt:
        console.print(f"ended by {interrupt}; no report was written")
        return 128 + interrupt.number
    summary = summarise(recording)
    files = _write(recording, summary, options.out)
    console.print(result_table(recording, summary, files))
    return 0


def _record(options: DemoOptions, console: Console, flag: list[int]) -> Recording:
    with LiveLine(console) as line:
        demo = _Demo(options, line, flag)
        with running_graph(options.out / "logs", demo.tend, options.params) as graph:
            demo.graph = graph
            graph.begin()
            demo.watch(graph)
            graph.finish()
            return graph.recording


@dataclass
class _Demo:
    """What happens while the graph runs: the live line, the signals, the change of the instruction."""

    options: DemoOptions
    line: LiveLine
    flag: list[int]
    graph: Graph | None = None

    def tend(self) -> None:
        """End on a signal, else show how it goes."""
        if self.flag:
            raise InterruptError(self.flag[0])
        if self.graph is not None:
            text = live_text(self.graph.recording, time.time_ns(), self.options.seconds)
            self.line.show(text, time.monotonic())

    def watch(self, graph: Graph) -> None:
        """Receive until the end; change the instruction half-way."""
        recording = graph.recording
        half, end = (recording.start + round(part * self.options.seconds * 1e9) for part in (0.5, 1.0))
        while (now := time.time_ns()) < end:
            if now >= half and len(recording.instructions) == 1:
                graph.operator.instruct(INSTRUCTIONS[1])
            graph.step()


@contextmanager
def _flagged_signals() -> Iterator[list[int]]:
    """Yield a list that receives SIGINT, SIGTERM and SIGHUP instead of their breaking into whatever runs."""
    flag: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        flag.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, note) for number in numbers]
    try:
        yield flag
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _write(recording: Recording, summary: dict[str, Any], out: Path) -> dict[str, Path]:
    files = {"summary": out / "summary.json", "report": out / "report.png"}
    files["summary"].write_text(json.dumps(summary, indent=2) + "\n")
    write_report(recording, summary, files["report"])
    return files
