"""What the terminal shows: one line while the demo runs, a table at its end. Imports no ROS."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from .recording import Recording, Status


class LiveLine:
    """A line that is rewritten in place on a terminal, and printed about once a second elsewhere.

    A context; call `show` as often as you like.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._last: tuple[float, str] = (-math.inf, "")

    def show(self, text: str, now: float) -> None:
        """Show `text` at `now`, seconds on any steady clock."""
        period = 1.0 if self._live is None else 0.25
        if text == self._last[1] or now - self._last[0] < period:
            return
        self._last = (now, text)
        if self._live is None:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)

    def __enter__(self) -> LiveLine:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()


def live_text(recording: Recording, now: int, seconds: float) -> str:
    """The live line at `now` (ns) of a run of `seconds` from the first chunk."""
    return _progress(recording, now, seconds) if recording.start and recording.chunks else _waiting(recording.status)


def _waiting(status: Status | None) -> str:
    if status is None:
        return "starting two cameras, a robot and the policy node …"
    return f"policy node {status.state}: {status.reason or 'waiting for the first chunk'}"


def _progress(recording: Recording, now: int, seconds: float) -> str:
    chunk, status = recording.chunks[-1], recording.status
    parts = [
        f"{(now - recording.start) * 1e-9:4.1f}/{seconds:g} s",
        f"{recording.recent_rate(now):4.1f} chunks/s",
        f"latency {chunk.latency * 1e3:3.0f} ms",
        f"age {chunk.age * 1e3:3.0f} ms",
        f'epoch {chunk.epoch} "{chunk.instruction}"',
        *(_input_ages(status) if status else ()),  # last, because a narrow terminal cuts the line off
    ]
    return "  ·  ".join(parts)


def _input_ages(status: Status) -> tuple[str, ...]:
    ages = [
        f"{stream.name} {stream.header_age * 1e3:.0f}" for stream in status.streams if math.isfinite(stream.header_age)
    ]
    return (f"inputs {', '.join(ages)} ms",) if ages else ()


def result_table(recording: Recording, summary: Mapping[str, Any], files: Mapping[str, Path]) -> Table:
    """The table at the end of a run."""
    table = Table(title="flashrt_ros demo", title_justify="left", show_header=False, title_style="bold")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    latency, age = summary["latency_ms"], summary["age_ms"]
    table.add_row("action chunks", f"{summary['chunks']} at {summary['rate_hz']:.2f} Hz, {summary['epochs']} epochs")
    table.add_row("latency", _milliseconds(latency) + "   windows filled → chunk received")
    table.add_row("age", _milliseconds(age) + "   oldest observation stamp → chunk received")
    if recording.status is not None:
        _add_status_rows(table, recording.status)
    reasons = [f"\n{refused.count} × {refused.what}: {refused.last_reason}" for refused in recording.refusals]
    table.add_row("refused", escape(f"{summary['refused']} messages and chunks{''.join(reasons)}"))
    table.add_row("stale replays", str(summary["stale_replays"]))
    table.add_row("copied", f"{summary['bytes_copied_per_frame']:,} bytes a frame, once")
    table.add_row("contract", summary["fingerprint"])
    for what, path in files.items():
        table.add_row(what, str(path))
    return table


def _add_status_rows(table: Table, status: Status) -> None:
    table.add_row("policy", f"{status.policy} ({status.checkpoint}), {status.precision}, on {status.device}")
    table.add_row("replays", ", ".join(f"{name} {count}" for name, _, count in status.replays))
    for stream in status.streams:
        table.add_row(stream.name, f"{stream.received} received at {stream.rate:.1f} Hz, {stream.used} used")


def _milliseconds(figures: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.1f}" for name, value in figures.items()) + " ms"
