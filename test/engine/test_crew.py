"""Work that several threads share is done once each, in any company, and lets no error or thread get lost."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest

from flashrt_ros.engine import crew
from flashrt_ros.engine.crew import SharedWork


def _slow(number: int) -> bytes:
    time.sleep(0.002)
    return bytes([number])


def test_results_come_in_the_order_of_the_calls() -> None:
    assert SharedWork([partial(_slow, n) for n in range(40)]).finish() == [bytes([n]) for n in range(40)]


def test_every_call_is_made_once() -> None:
    made: list[int] = []

    def call(number: int) -> bytes:
        made.append(number)
        return b""

    for _ in range(50):
        made.clear()
        SharedWork([partial(call, n) for n in range(30)]).finish()
        assert sorted(made) == list(range(30))


def test_no_calls_are_done_at_once() -> None:
    work: SharedWork[bytes] = SharedWork([])
    assert not work.do_last()
    assert not work.do_spare()
    assert work.finish() == []
    work.abandon()


@pytest.mark.parametrize(("helpers", "spare"), [(0, 5), (1, 4), (3, 2), (15, 1)])
def test_calls_that_helpers_on_their_way_can_make_are_left_to_them(
    monkeypatch: pytest.MonkeyPatch, helpers: int, spare: int
) -> None:
    asked: list[Callable[[], object]] = []  # helpers that have yet to come
    monkeypatch.setattr(crew, "_crew", lambda: SimpleNamespace(size=helpers, call=asked.append))
    work = SharedWork([partial(_slow, n) for n in range(5)])
    assert [work.do_spare() for _ in range(6)] == [True] * spare + [False] * (6 - spare)
    for help_out in asked:
        help_out()
    assert not work.do_spare()
    assert work.finish() == [bytes([n]) for n in range(5)]


def test_helpers_may_be_called_for_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Callable[[], object]] = []
    monkeypatch.setattr(crew, "_crew", lambda: SimpleNamespace(size=15, call=asked.append))
    work = SharedWork([partial(_slow, n) for n in range(5)], most_helpers=5)
    assert not work.do_spare()
    assert len(asked) == 5
    for help_out in asked:
        help_out()
    assert work.finish() == [bytes([n]) for n in range(5)]


@pytest.mark.parametrize("pause", [0.0, 1e-5, 3e-4])
def test_no_call_is_lost_however_threads_fall_asleep(pause: float) -> None:
    team, made = crew._Crew(3), threading.Semaphore(0)

    def ask() -> None:
        for _ in range(200):
            team.call(made.release)
            team.call(made.release)
            time.sleep(pause)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(made.acquire(timeout=10) for _ in range(3 * 200 * 2))
    assert not made.acquire(timeout=0.01)


def test_called_threads_run_side_by_side() -> None:
    team, together = crew._Crew(4), threading.Barrier(5)
    for _ in range(50):
        for _ in range(4):
            team.call(partial(together.wait, 10))
        together.wait(10)


def test_what_was_called_for_is_not_kept() -> None:
    team, made = crew._Crew(1), threading.Event()

    class Function:
        def __call__(self) -> None:
            made.set()

    function = Function()
    kept = weakref.ref(function)
    team.call(function)
    del function
    assert made.wait(10)
    deadline = time.monotonic() + 10
    while kept() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert kept() is None


def test_what_no_helper_came_for_is_done_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "_crew", lambda: SimpleNamespace(size=2, call=lambda help_out: None))
    work = SharedWork([partial(_slow, n) for n in range(5)])
    while work.do_spare():
        pass
    assert work.finish() == [bytes([n]) for n in range(5)]


def test_one_call_is_made_by_the_thread_that_asks() -> None:
    seen: list[int] = []

    def call() -> bytes:
        seen.append(threading.get_ident())
        return b"x"

    work = SharedWork([call])
    assert work.do_last()
    assert not work.do_last()
    assert (work.finish(), seen) == ([b"x"], [threading.get_ident()])


@pytest.mark.parametrize("failing", [0, 19])
def test_an_error_is_raised_whoever_met_it(failing: int) -> None:
    def call(number: int) -> bytes:
        if number == failing:
            raise OSError(f"call {number}")
        return _slow(number)

    with pytest.raises(OSError, match=f"call {failing}"):
        SharedWork([partial(call, n) for n in range(20)]).finish()
    assert SharedWork([partial(_slow, 7)]).finish() == [b"\7"]  # the threads are still there


def test_abandoned_work_is_at_rest_and_stays_so() -> None:
    begun: list[int] = []
    ended: list[int] = []

    def call(number: int) -> bytes:
        begun.append(number)
        _slow(number)
        ended.append(number)
        return b""

    work = SharedWork([partial(call, n) for n in range(200)])
    work.do_last()
    work.abandon()
    assert sorted(begun) == sorted(ended)
    count = len(begun)
    assert 0 < count < 200
    time.sleep(0.02)
    assert len(begun) == count
    assert not work.do_last()


def test_several_threads_have_work_done_at_once() -> None:
    found: dict[int, list[bytes]] = {}

    def ask(first: int) -> None:
        found[first] = SharedWork([partial(_slow, first + n) for n in range(10)]).finish()

    threads = [threading.Thread(target=ask, args=(first,)) for first in range(0, 80, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {first: [bytes([first + n]) for n in range(10)] for first in range(0, 80, 10)}
