"""A progress bar where `rich` and a terminal are there, and a line every ten per cent elsewhere."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int], None]


@contextmanager
def progress(label: str, total: int, things: str = "") -> Iterator[Advance]:
    """Yield a function that counts `things` as done, bytes where they have no name; any thread may call it."""
    if sys.stderr.isatty() and importlib.util.find_spec("rich") is not None:
        with _bar(label, total, things) as advance:
            yield advance
    else:
        yield _Lines(label, total, things).advance


@contextmanager
def _bar(label: str, total: int, things: str) -> Iterator[Advance]:
    from rich import progress as rich
    from rich.console import Console

    counted = (rich.MofNCompleteColumn(), rich.TextColumn(things))
    done = counted if things else (rich.DownloadColumn(), rich.TransferSpeedColumn())
    columns = (rich.TextColumn(label), rich.BarColumn(), *done, rich.TimeRemainingColumn())
    with rich.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total)
        yield lambda count: bar.advance(task, count)


class _Lines:
    def __init__(self, label: str, total: int, things: str) -> None:
        self._label, self._total = label, total
        self._size = f"{total} {things}" if things else f"{total / 1e9:.2f} GB"
        self._done = self._told = 0
        self._lock = threading.Lock()

    def advance(self, count: int) -> None:
        with self._lock:
            self._done += count
            tenths = 10 * self._done // max(1, self._total)
            if tenths > self._told:
                self._told = tenths
                print(f"{self._label}: {10 * tenths} % of {self._size}", file=sys.stderr, flush=True)
