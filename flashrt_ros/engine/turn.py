"""Who may drive."""

from __future__ import annotations

import threading

from .errors import BusyError


class Turn:
    """A lock that refuses a second driver instead of letting it wait: `with turn.begin("act"): …`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def begin(self, action: str) -> Turn:
        """Take the turn, which `end` or leaving the context gives back; BusyError if it is taken."""
        if not self._lock.acquire(False):
            raise BusyError(f"cannot {action}: the session is being driven already (by a thread, stage or open window)")
        return self

    def end(self) -> None:
        """Give the turn back."""
        self._lock.release()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self._lock.release()
