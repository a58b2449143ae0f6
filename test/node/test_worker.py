"""The worker thread: ticks are skipped and counted, jobs wait a bounded time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from flashrt_ros.node.worker import Worker, WorkerBusyError
from test.node.latch import Latch
from test.node.rig import wait_until


class Ticks:
    """Counts ticks, each of which may be held."""

    def __init__(self) -> None:
        self.latch = Latch()
        self.done = 0
        self.worker = Worker(self.tick)

    def tick(self) -> None:
        self.latch.pass_through()
        self.done += 1

    def hold(self) -> None:
        """Make the worker busy with a tick."""
        self.latch.close()
        assert self.worker.tick()
        assert self.latch.entered.wait(5)


@pytest.fixture
def ticks() -> Iterator[Ticks]:
    made = Ticks()
    yield made
    made.latch.open()
    assert made.worker.stop(5)


def test_a_tick_that_finds_the_worker_busy_is_skipped_and_counted(ticks: Ticks) -> None:
    ticks.hold()
    assert not ticks.worker.tick()
    assert not ticks.worker.tick()
    ticks.latch.open()
    assert ticks.worker.settle(5)
    assert (ticks.done, ticks.worker.skipped) == (1, 2)
    assert ticks.worker.tick()
    wait_until(lambda: ticks.done == 2, "the next tick is done")


def test_a_job_runs_in_the_workers_thread_and_gives_its_result_or_its_exception(ticks: Ticks) -> None:
    assert ticks.worker.call(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        ticks.worker.call(lambda: 1 // 0)
    assert ticks.worker.call(lambda: 7) == 7


def test_a_job_that_does_not_begin_in_time_is_never_done(ticks: Ticks) -> None:
    ticks.hold()
    done: list[int] = []
    with pytest.raises(WorkerBusyError, match=r"busy for 0\.05 s"):  # though it stays busy until the latch opens
        ticks.worker.call(lambda: done.append(1), timeout=0.05)
    ticks.latch.open()
    assert ticks.worker.settle(5)
    assert ticks.worker.call(lambda: len(done)) == 0


def test_a_job_that_has_begun_is_waited_for_beyond_the_bound(ticks: Ticks) -> None:
    assert ticks.worker.call(lambda: time.sleep(0.2) or 5, timeout=0.05) == 5  # type: ignore[func-returns-value]


def test_jobs_are_done_in_order(ticks: Ticks) -> None:
    ticks.hold()
    order: list[int] = []
    futures = [ticks.worker.submit(lambda i=i: order.append(i)) for i in range(5)]  # type: ignore[misc]
    ticks.latch.open()
    for future in futures:
        future.result(5)
    assert order == list(range(5))


def test_settle_drops_a_tick_that_has_not_begun_and_waits_for_the_one_that_has(ticks: Ticks) -> None:
    ticks.hold()
    assert not ticks.worker.settle(0.05)
    ticks.latch.open()
    assert ticks.worker.settle(5)
    assert ticks.done == 1


def test_stop_cancels_the_queue_and_refuses_what_comes_later(ticks: Ticks) -> None:
    ticks.hold()
    queued = ticks.worker.submit(lambda: 1)
    assert not ticks.worker.stop(0.05)
    assert queued.cancelled()
    with pytest.raises(WorkerBusyError, match="stopping"):
        ticks.worker.call(lambda: 1)
    assert not ticks.worker.tick()
    ticks.latch.open()
    assert ticks.worker.stop(5)
    assert not ticks.worker.alive
    wait_until(lambda: ticks.done == 1, "the held tick ended")
