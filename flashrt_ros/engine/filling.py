"""The block of a `with` in which a host writes a window."""

from __future__ import annotations

from types import TracebackType
from typing import Generic, TypeVar

from .turn import Turn
from .versions import VersionLedger
from .windows import Filling

Given = TypeVar("Given")


class FillingBlock(Generic[Given]):
    """Keeps other drivers out, and makes what was written a new version of the window when it ends.

    A class and not a generator, which takes several times as long when its code is not in the caches.

    Args:
        given: what the block is given, to write with.
        unfilled: names of windows that no stage may read; the session's own set.
    """

    __slots__ = ("_filling", "_given", "_ledger", "_turn", "_unfilled")

    def __init__(self, filling: Filling, given: Given, turn: Turn, ledger: VersionLedger, unfilled: set[str]) -> None:
        self._filling, self._given = filling, given
        self._turn, self._ledger, self._unfilled = turn, ledger, unfilled

    def __enter__(self) -> Given:
        window = self._filling.window
        name = window.buffer.name
        self._turn.begin(f"fill '{name}'")
        try:
            window.wait()
            window.refresh()
        except BaseException:
            self._turn.end()
            raise
        self._unfilled.add(name)  # a block that breaks off leaves a torn window, which no stage may read
        return self._given

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        window = self._filling.window
        name = window.buffer.name
        try:
            self._ledger.bump(name)
            window.upload(self._filling.rows)
            if kind is None:
                self._unfilled.discard(name)
        finally:
            self._turn.end()
