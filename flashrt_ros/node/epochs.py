"""Epochs: which results still belong to what the robot is asked to do now.

A decision takes time, and while it runs the instruction may change, a capsule may be restored, or the node
may be deactivated. Each of these begins a new epoch. A decision remembers the epoch in which it began, and
its chunk is published only if that epoch still lasts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from threading import Lock


class EpochCause(Enum):
    """What begins a new epoch."""

    INSTRUCTION = "the instruction changed"
    RESTORE = "a capsule was restored"
    FORK = "a capsule was forked"
    RESET = "the session was reset"
    ACTIVATION = "the node was activated"
    DEACTIVATION = "the node was deactivated"
    CLOCK_JUMP = "the clock jumped back"


class Epochs:
    """The epoch counter and the chunk counter of one node. Safe to use from several threads.

    Epochs count from 0 and chunk ids from 1; both only ever rise, over every activation.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._current = 0
        self._chunk_id = 0
        self._causes: Counter[EpochCause] = Counter()
        self._dropped = 0

    @property
    def current(self) -> int:
        """The epoch that a decision beginning now belongs to."""
        return self._current

    @property
    def last_chunk_id(self) -> int:
        """Id of the newest published chunk; 0 if there is none."""
        return self._chunk_id

    @property
    def dropped(self) -> int:
        """Results that came too late for their epoch and were not published."""
        return self._dropped

    @property
    def causes(self) -> dict[EpochCause, int]:
        """How often each cause has begun an epoch."""
        with self._lock:
            return dict(self._causes)

    def begin(self, cause: EpochCause) -> int:
        """Begin a new epoch and return its number. Waits for a publication that is under way, for no longer.

        When it returns, no result of an older epoch will be published any more.
        """
        with self._lock:
            self._current += 1
            self._causes[cause] += 1
            return self._current

    @contextmanager
    def publishing(self, epoch: int) -> Iterator[int | None]:
        """Publish the result of a decision that began in `epoch`, within this context.

        Yields:
            The chunk's id if the epoch still lasts; it cannot end before the context does. None if it has
            ended: the result must be dropped, which is counted. An id whose publication raised is not used
            again.

        Calling `begin` within the context waits for ever: publish there, and do nothing else.
        """
        with self._lock:
            if epoch != self._current:
                self._dropped += 1
                yield None
                return
            self._chunk_id += 1
            yield self._chunk_id


class ClockWatch:
    """Sees a clock jump back, as `/clock` does when a bag or a simulation starts again."""

    def __init__(self) -> None:
        self._latest_ns: int | None = None

    def jumped_back(self, now_ns: int) -> bool:
        """True if `now_ns` (node clock) is before the last time that was asked about."""
        before, self._latest_ns = self._latest_ns, now_ns
        return before is not None and now_ns < before

    def reset(self) -> None:
        """Forget the last time, at activation."""
        self._latest_ns = None
