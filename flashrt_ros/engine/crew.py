"""Work that several threads share, for calls that leave the interpreter to others most of the time.

It does with less of the interpreter than a thread pool of the standard library. All helpers wake at the same moment
and need it one after the other, each on a core whose caches know nothing of what it runs: every step of one delays all.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import count
from queue import SimpleQueue
from typing import Generic, TypeVar

Result = TypeVar("Result")

_MOST_THREADS = 16


class SharedWork(Generic[Result]):
    """Calls that several threads make side by side: helpers from the first to the last, this one from the last on."""

    def __init__(self, calls: Sequence[Callable[[], Result]]) -> None:
        self._left = deque(enumerate(calls))  # safe to take from at both ends by any thread
        self._count_of_calls = len(calls)
        self._results: dict[int, Result] = {}
        self._errors: dict[int, Exception] = {}
        self._done = count()  # safe to advance by any thread
        self._all_done = threading.Event()
        self._count()  # none is done yet, which may be all
        crew = _crew()
        helpers = max(0, min(len(calls) - 1, crew.size))
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
        self._all_done.wait()
        if self._errors:
            raise self._errors[min(self._errors)]
        return [self._results[index] for index in range(self._count_of_calls)]

    def abandon(self) -> None:
        """Return when nobody makes a call any more, nor will."""
        with suppress(IndexError):
            while True:
                self._left.pop()
                self._count()
        self._all_done.wait()

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
            self._all_done.set()


class _Crew:
    """Threads that stay, as starting them costs more than most calls. They end with the process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._calls: SimpleQueue[Callable[[], object]] = SimpleQueue()
        for number in range(size):
            threading.Thread(target=self._serve, name=f"crew-{number}", daemon=True).start()

    def call(self, function: Callable[[], object]) -> None:
        """Let one of the threads call `function`, which must not raise."""
        self._calls.put(function)

    def _serve(self) -> None:
        while True:
            self._calls.get()()


@lru_cache(maxsize=1)
def _crew() -> _Crew:
    """A thread a core, but for the one that has the work done."""
    return _Crew(min(_MOST_THREADS, len(os.sched_getaffinity(0))) - 1)


os.register_at_fork(after_in_child=_crew.cache_clear)  # a child has the object, but none of its threads
