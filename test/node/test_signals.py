"""SIGINT and SIGTERM end the process with code 0, in bounded time, from every lifecycle state."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from test.node.process import NodeProcess
from test.node.rig import Rig, record_status, wait_until
from test.node.robot import default_robot

STOP_TIMEOUT = 2.0
MARGIN = 6.0  # seconds for two loaded cores to end an interpreter


def unconfigured(node: NodeProcess) -> None:
    node.wait_for_state("unconfigured")


def inactive(node: NodeProcess) -> None:
    assert node.change("configure")


def active(node: NodeProcess) -> None:
    inactive(node)
    assert node.change("activate")


def deactivated(node: NodeProcess) -> None:
    active(node)
    assert node.change("deactivate")


def cleaned_up(node: NodeProcess) -> None:
    inactive(node)
    assert node.change("cleanup")


def finalized(node: NodeProcess) -> None:
    inactive(node)
    assert node.change("shutdown")


@pytest.mark.parametrize("reach", [unconfigured, inactive, active, deactivated, cleaned_up, finalized])
def test_table_sigint_in_every_state_ends_with_code_0(rig: Rig, reach: Callable[[NodeProcess], None]) -> None:
    node = NodeProcess(rig)
    reach(node)
    code, seconds, output = node.end(signal.SIGINT, limit=STOP_TIMEOUT + MARGIN)
    assert code == 0, output
    assert seconds < STOP_TIMEOUT + MARGIN
    assert "Traceback" not in output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_table_a_signal_in_mid_replay_ends_with_code_0_after_the_replay(rig: Rig, number: int) -> None:
    default_robot(rig).start()
    statuses = record_status(rig)
    node = NodeProcess(rig, {"autostart": True, "policy.delay": 0.5, "stop_timeout": STOP_TIMEOUT, "warmup": 0})
    statuses.wait_for(lambda m: m.ticks_skipped > 10, "ticks find a replay under way", timeout=60)
    code, _, output = node.end(number, limit=STOP_TIMEOUT + MARGIN)
    assert code == 0, output
    assert "leaving without it" not in output
    assert "Traceback" not in output


def test_a_replay_that_outlasts_the_bound_is_left_behind(rig: Rig) -> None:
    default_robot(rig).start()
    statuses = record_status(rig)
    node = NodeProcess(rig, {"autostart": True, "policy.delay": 60.0, "stop_timeout": 0.5, "warmup": 0})
    # One skipped tick may have met a decision that found no image yet; a row of them met the replay.
    statuses.wait_for(lambda m: m.ticks_skipped > 10, "ticks find a replay under way", timeout=60)
    code, seconds, output = node.end(signal.SIGINT, limit=0.5 + MARGIN)
    assert code == 0, output
    assert seconds < 0.5 + MARGIN
    assert "leaving without it" in output


def test_table_a_signal_while_configuring_ends_with_code_0(rig: Rig) -> None:
    node = NodeProcess(rig, {"autostart": True, "policy.load_time": 60.0, "stop_timeout": 0.5})
    node.wait_for_state("configuring")
    code, seconds, output = node.end(signal.SIGINT, limit=5.0 + MARGIN)
    assert code == 0, output
    assert seconds < 5.0 + MARGIN


def test_a_signal_before_the_node_exists_ends_with_code_0(rig: Rig) -> None:
    """Importing takes seconds; Ctrl-C meanwhile is no traceback."""
    node = NodeProcess(rig)
    wait_until(lambda: catches(node.process.pid, signal.SIGTERM), "the handlers are installed")
    code, _, output = node.end(signal.SIGTERM, limit=30)
    assert code == 0, output
    assert "Traceback" not in output


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler of its own for the signal."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(fields["SigCgt"], 16) >> (number - 1) & 1)


def test_a_parameter_file_that_cannot_be_read_is_one_line_and_code_2(rig: Rig) -> None:
    node = NodeProcess(rig, {"action_joints": "[1, two, 3.0"})
    output, _ = node.process.communicate(timeout=60)
    assert node.process.returncode == 2
    assert "policy_node: cannot start" in output
    assert "Traceback" not in output
