"""What asks a process to end: signals that arrive at any instruction, once or again and again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator

import pytest

from flashrt_ros.node import stop_signal
from flashrt_ros.node.stop_signal import NUMBERS, StopSignal

LIMIT = 60


@pytest.fixture
def stop() -> Iterator[StopSignal]:
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield StopSignal()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_sets_it_and_ends_a_wait(stop: StopSignal, number: signal.Signals) -> None:
    assert not stop.is_set()
    os.kill(os.getpid(), number)
    start = time.monotonic()
    assert stop.wait(LIMIT)
    assert time.monotonic() - start < LIMIT / 2
    assert stop.is_set()


def test_a_wait_ends_without_a_signal(stop: StopSignal) -> None:
    assert not stop.wait(0.01)
    assert not stop.wait(-1.0)
    assert not stop.is_set()


# A handler at every instruction of the code that waits, and of the handler itself, which a second signal may interrupt.
EVERYWHERE = """
    import signal, sys, threading
    from flashrt_ros.node.stop_signal import StopSignal
    stop = {made}
    depth = 0
    def trace(frame, event, argument):
        global depth
        frame.f_trace_opcodes = True
        if frame.f_code.co_filename == {file!r} and depth < 2:
            depth += 1
            stop.set()
            depth -= 1
        return trace
    sys.settrace(trace)
    stop.wait(0.05)
    sys.settrace(None)
    print("set" if stop.is_set() else "not set")
"""


def run_with_a_handler_everywhere(made: str, file: str, limit: float) -> str:
    source = textwrap.dedent(EVERYWHERE.format(made=made, file=file))
    found = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=limit, check=True)
    return found.stdout.strip()


def test_a_handler_may_interrupt_a_wait_and_another_handler_anywhere() -> None:
    assert run_with_a_handler_everywhere("StopSignal()", stop_signal.__file__, LIMIT) == "set"


def test_an_event_in_its_place_would_wait_for_itself() -> None:
    import threading

    with pytest.raises(subprocess.TimeoutExpired):
        run_with_a_handler_everywhere("threading.Event()", threading.__file__, 5)


def test_many_signals_at_any_moment_end_a_process_that_waits_in_short_steps() -> None:
    source = textwrap.dedent("""
        from flashrt_ros.node.stop_signal import StopSignal
        stop = StopSignal()
        print("ready", flush=True)
        while not stop.is_set():
            stop.wait(1e-5)
    """)
    for _ in range(5):
        with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            for _ in range(20):
                process.send_signal(signal.SIGTERM)
                process.send_signal(signal.SIGINT)
            # The last ones may find an interpreter that is on its way out, and has given its handlers back.
            assert process.wait(LIMIT) in (0, *(-number for number in NUMBERS))
