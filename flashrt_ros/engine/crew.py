"""Work that several threads share, for calls that leave the interpreter to others most of the time.

It does with less of the interpreter than a thread pool of the standard library. All helpers wake at the same moment
and need it one after the other, each on a core whose caches know nothing of what it runs: every step of one delays all,
and one that finds the interpreter taken falls asleep again.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import count
from typing import Generic, TypeVar

Result = TypeVar("Result")

_MOST_THREADS = 16


class SharedWork(Generic[Result]):
    """Calls that several threads make side by side: helpers from the first to the last, this one from the last on.

    Args:
        calls: what to call.
        most_helpers: how many of them may be begun by helpers at once; by default all but the one that is left for this
            thread.
    """

    def __init__(self, calls: Sequence[Callable[[], Result]], most_helpers: int | None = None) -> None:
        self._left = deque(enumerate(calls))  # safe to take from at both ends by any thread
        self._count_of_calls = len(calls)
        self._results: dict[int, Result] = {}
        self._errors: dict[int, Exception] = {}
        self._done = count()  # safe to advance by any thread
        self._all_done = closed_gate()
        self._count()  # none is done yet, which may be all
        crew = _crew()
        helpers = max(0, min(len(calls) - 1 if most_helpers is None else most_helpers, crew.size))
        self._on_their_way = deque(range(helpers))  # safe to take from by any thread
        for _ in range(helpers):
            crew.call(self._help)

    def do_last(self) -> bool:
        """Make the last call that nobody has begun; False if there is none."""
        return self._do(self._left.pop)

    def do_spare(self) -> bool:
        """Make the last call that nobody has begun, if more are left than helpers are on their way; else False."""
        return len(self._left) > len(self._on_their_way) and self.do_last()

    def finish(self) -> list[Result]:
        """The results in order, when all calls are made; raises what one of them raised."""
        while self.do_last():
            pass
        pass_gate(self._all_done)
        if self._errors:
            raise self._errors[min(self._errors)]
        return [self._results[index] for index in range(self._count_of_calls)]

    def abandon(self) -> None:
        """Return when nobody makes a call any more, nor will."""
        with suppress(IndexError):
            while True:
                self._left.pop()
                self._count()
        pass_gate(self._all_done)

    def _help(self) -> None:
        self._on_their_way.pop()
        while self._do(self._left.popleft):
            pass

    def _do(self, take: Callable[[], tuple[int, Callable[[], Result]]]) -> bool:
        try:
            index, call = take()
        except IndexError:
            return False
        try:
            self._results[index] = call()
        except Exception as error:
            self._errors[index] = error
        finally:
            self._count()
        return True

    def _count(self) -> None:
        if next(self._done) == self._count_of_calls:
            self._all_done.release()


class _Crew:
    """Threads that stay, as starting them costs more than most calls. They end with the process.

    Each sleeps on a lock of its own, so that all that are called wake side by side. From a queue of the standard
    library they would come one after the other: up to Python 3.12 it wakes one, which wakes the next once it runs.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._calls: deque[Callable[[], object]] = deque()
        self._asleep: deque[threading.Lock] = deque()  # what they sleep on; safe to change by any thread, as calls are
        for number in range(size):
            threading.Thread(target=self._serve, name=f"crew-{number}", daemon=True).start()

    def call(self, function: Callable[[], object]) -> None:
        """Let one of the threads call `function`, which must not raise; the first that is free if none is now."""
        self._calls.append(function)
        try:
            bell = self._asleep.pop()
        except IndexError:
            return
        bell.release()

    def _serve(self) -> None:
        bell = closed_gate()
        while True:
            try:
                function = self._calls.popleft()
            except IndexError:
                self._sleep(bell)
            else:
                function()
                del function  # and with it what it works on

    def _sleep(self, bell: threading.Lock) -> None:
        """Sleep until the bell rings, unless something was called before anybody could see that this thread sleeps."""
        self._asleep.append(bell)
        if self._calls:
            try:
                self._asleep.remove(bell)
            except ValueError:
                pass  # somebody is about to ring it, and it must not ring twice
            else:
                return
        bell.acquire()


def closed_gate() -> threading.Lock:
    """A lock that one thread opens by releasing it, once; it takes a fraction of the time that an event takes."""
    gate = threading.Lock()
    gate.acquire()
    return gate


def pass_gate(gate: threading.Lock, longest_wait: float = -1) -> None:
    """Wait until the gate is open, at most `longest_wait` seconds if that is not negative, and leave it open."""
    if gate.acquire(timeout=longest_wait):
        gate.release()


@lru_cache(maxsize=1)
def _crew() -> _Crew:
    """A thread a core, but for the one that has the work done."""
    return _Crew(min(_MOST_THREADS, len(os.sched_getaffinity(0))) - 1)


os.register_at_fork(after_in_child=_crew.cache_clear)  # a child has the object, but none of its threads
