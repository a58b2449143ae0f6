"""Many sessions over one working set."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .capsule import Parked
from .errors import SessionExistsError, SessionLimitError, StateError, UnknownSessionError
from .session import Session

DEFAULT_CAPACITY = 16


class SessionManager:
    """Opens sessions that share the graphs and buffers of one `Session`, and switches between them.

    A switch saves what the leaving session changed and brings back what differs for the entering one. A session that
    was opened with its own buffers is used as it is. Every block is allocated by `open`, so switching never allocates
    and any number of switches uses the same memory.

    Args:
        shared: a configured session; its state becomes that of the first session, called `first`.
        capacity: sessions that may be open at once.
        build: makes a configured session with buffers of its own, for `open(..., own_buffers=True)`.
    """

    def __init__(
        self,
        shared: Session,
        *,
        first: str = "main",
        capacity: int = DEFAULT_CAPACITY,
        build: Callable[[], Session] | None = None,
    ) -> None:
        self._shared, self._capacity, self._build = shared, capacity, build
        self._parked: dict[str, Parked] = {}
        self._own: dict[str, Session] = {}
        self._turns = _Turns()
        self.resident = first
        self.switches = 0
        self._blank = shared.new_parked()
        shared.park(self._blank)
        self._parked[first] = shared.new_parked()

    @property
    def names(self) -> tuple[str, ...]:
        """Open sessions, sorted."""
        return tuple(sorted([*self._parked, *self._own]))

    def open(self, name: str, *, own_buffers: bool = False, fork: bool = False) -> None:
        """Open a session that begins as the shared one was when the manager was made.

        Args:
            own_buffers: give it buffers and graphs of its own, so that it needs no switch.
            fork: begin as the resident session is now instead.

        Raises:
            SessionLimitError: the name is taken, or `capacity` sessions are open.
        """
        with self._turns:
            if name in self.names:
                raise SessionExistsError(f"a session called '{name}' is open already; close it or choose another name")
            if len(self.names) >= self._capacity:
                raise SessionLimitError(f"{self._capacity} sessions are open already, which is the limit; close one")
            if own_buffers:
                self._own[name] = self._built()
            else:
                parked = self._blank.copy()
                if fork:
                    self._shared.park(parked)
                self._parked[name] = parked

    def close(self, name: str) -> None:
        """Forget a session and what it holds. The resident one can't be closed while it is resident."""
        with self._turns:
            self._require_open(name)
            if name == self.resident:
                raise SessionLimitError(f"session '{name}' is resident; use another one first, then close it")
            own = self._own.pop(name, None)
            if own is not None:
                own.close()
            self._parked.pop(name, None)

    @contextmanager
    def use(self, name: str) -> Iterator[Session]:
        """Yield the session that drives as `name`. Callers in other threads wait their turn, first come first served.

        Raises:
            SessionLimitError: no session of that name is open.
        """
        with self._turns:
            self._require_open(name)
            if name in self._own:
                yield self._own[name]
                return
            if name != self.resident:
                self._switch(name)
            yield self._shared

    def switch_to(self, name: str) -> None:
        """Make `name` resident; SessionLimitError if no session of that name is open."""
        with self.use(name):
            pass

    def _switch(self, name: str) -> None:
        self._shared.park(self._parked[self.resident])
        self._shared.unpark(self._parked[name])
        self.resident = name
        self.switches += 1

    def _require_open(self, name: str) -> None:
        if name not in self._parked and name not in self._own:
            raise UnknownSessionError(f"no session called '{name}' is open; open are: {', '.join(self.names)}")

    def _built(self) -> Session:
        if self._build is None:
            raise SessionLimitError("this manager was made without `build`, so it can't open sessions with own buffers")
        return self._build()


class _Turns:
    """A lock that serves waiting threads in the order of their coming, and refuses to be taken twice by one."""

    def __init__(self) -> None:
        self._queue: deque[int] = deque()
        self._changed = threading.Condition()

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._changed:
            if me in self._queue:
                raise StateError("this thread is using a session of the manager already; leave that block first")
            self._queue.append(me)
            self._changed.wait_for(lambda: self._queue[0] == me)

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._queue.popleft()
            self._changed.notify_all()
