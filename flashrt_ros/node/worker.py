"""The one thread that owns the session: it builds it, decides on each tick, does what is asked between, and closes it.

Ticks are never queued: one that finds the worker busy is skipped and counted, so that a slow decision delays nothing
but itself. Jobs are queued, and who asked for one waits a bounded time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

T = TypeVar("T")


class WorkerBusyError(RuntimeError):
    """The worker did not come to a job within the time that its sender would wait; the job will not be done."""


class Worker:
    """A thread with one slot for a tick and a queue of jobs.

    Args:
        on_tick: one decision; it must not raise.
        name: of the thread.

    Attributes: `skipped`, ticks that found the worker busy, or that came too late.
    """

    def __init__(self, on_tick: Callable[[], None], name: str = "worker") -> None:
        self.skipped = 0
        self._on_tick = on_tick
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._condition = threading.Condition()
        self._tick_due = False
        self._busy = False
        self._stopping = False
        # A daemon, because a replay that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread.is_alive()

    def tick(self) -> bool:
        """Ask for one decision now; False, and counted, if the worker is busy."""
        with self._condition:
            if self._busy or self._tick_due or self._jobs or self._stopping:
                self.skipped += 1
                return False
            self._tick_due = True
            self._condition.notify()
            return True

    def skip(self, count: int) -> None:
        """Count ticks that were due and never came."""
        with self._condition:
            self.skipped += count

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queue `job`. Cancelling the future succeeds until the job begins."""
        future: Future[T] = Future()
        with self._condition:
            if self._stopping:
                future.cancel()
                return future
            self._jobs.append((future, job))
            self._condition.notify()
        return future

    def call(self, job: Callable[[], T], timeout: float | None = None) -> T:
        """Do `job` in the worker's thread and return its result, or raise what it raised.

        Args:
            timeout: longest wait until it begins (s); once begun it is waited for. None: wait as long as it takes.

        Raises:
            WorkerBusyError: it did not begin in time, or the worker is stopping; it will not be done.
        """
        future = self.submit(job)
        try:
            return future.result(timeout)
        except (TimeoutError, CancelledError):
            if future.cancelled() or future.cancel():
                waited = "it is stopping" if timeout is None else f"it was busy for {timeout:g} s"
                raise WorkerBusyError(f"the worker did not come to it: {waited}; ask again later") from None
            return future.result()

    def settle(self, timeout: float) -> bool:
        """Drop a tick that has not begun and wait for what has; False if that still runs after `timeout` s."""
        with self._condition:
            self._tick_due = False
            return self._condition.wait_for(lambda: not self._busy, timeout)

    def stop(self, timeout: float) -> bool:
        """End the thread after what it does now; cancel what is queued. False if it still runs after `timeout` s."""
        with self._condition:
            self._stopping = True
            self._tick_due = False
            while self._jobs:
                self._jobs.popleft()[0].cancel()
            self._condition.notify_all()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._next()) is not None:
            work()
            with self._condition:
                self._busy = False
                self._condition.notify_all()

    def _next(self) -> Callable[[], None] | None:
        """Wait for work; None when the thread is to end. Jobs come before ticks."""
        with self._condition:
            self._condition.wait_for(lambda: self._jobs or self._tick_due or self._stopping)
            if self._stopping:
                return None
            self._busy = True
            if self._jobs:
                future, job = self._jobs.popleft()
                return lambda: _fulfil(future, job)
            self._tick_due = False
            return self._on_tick


def _fulfil(future: Future[Any], job: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = job()
    except BaseException as error:  # the one who waits gets it, whatever it is
        future.set_exception(error)
    else:
        future.set_result(result)
