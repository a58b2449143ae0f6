"""One drives, and everybody else is refused at once."""

from __future__ import annotations

import threading

import pytest

from flashrt_ros.engine import BusyError
from flashrt_ros.engine.turn import Turn


def test_of_many_threads_that_ask_at_once_one_has_the_turn() -> None:
    turn, start, granted = Turn(), threading.Barrier(8), []

    def ask() -> None:
        start.wait()
        try:
            turn.begin("ask")
        except BusyError:
            return
        granted.append(True)

    for _ in range(20):
        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(granted) == 1
        granted.clear()
        turn.end()


def test_a_block_that_breaks_off_gives_the_turn_back() -> None:
    turn = Turn()
    with pytest.raises(ZeroDivisionError), turn.begin("divide"):
        print(1 // 0)
    with turn.begin("ask"), pytest.raises(BusyError, match="cannot answer: the session is being driven already"):
        turn.begin("answer")
    turn.begin("ask").end()
