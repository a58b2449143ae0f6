"""Who may drive."""

from __future__ import annotations

from .errors import BusyError


class Turn:
    """A lock that refuses a second driver instead of letting it wait: `with turn.begin("act"): …`.

    A list of one token, which a thread pops and appends in one step each. A `threading.Lock` takes three times as long
    when its code is not in the caches, as it is behind a decision: it parses its arguments.
    """

    def __init__(self) -> None:
        self._token = [None]

    def begin(self, action: str) -> Turn:
        """Take the turn, which `end` or leaving the context gives back; BusyError if it is taken."""
        try:
            self._token.pop()
        except IndexError:
            raise BusyError(
                f"cannot {action}: the session is being driven already (by a thread, stage or open window)"
            ) from None
        return self

    def end(self) -> None:
        """Give the turn back."""
        self._token.append(None)

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self.end()
