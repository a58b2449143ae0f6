"""The demo as a user runs it: real processes over DDS, its results, and every way in which it can end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import pytest
import yaml

from flashrt_ros.node.demo.shared_memory import FOLDER, mapped_segments, remove_segments

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 120.0  # seconds for anything to happen; the machine may be busy
CHILDREN = {"policy", "camera_front", "camera_wrist", "robot"}


@dataclass
class Demo:
    """A demo that runs, and its results."""

    process: subprocess.Popen[str]
    out: Path

    def read_until(self, pattern: str) -> None:
        """Until a line of the output matches."""
        assert self.process.stdout is not None
        seen = []
        for line in self.process.stdout:
            seen.append(line)
            if re.search(pattern, line):
                return
        pytest.fail(f"no line matched {pattern!r} in:\n{''.join(seen)}")

    def finish(self) -> tuple[int, str, str]:
        """Exit code, the rest of standard output, standard error."""
        output, errors = self.process.communicate(timeout=LIMIT)
        return self.process.returncode, output, errors

    def children(self) -> dict[str, int]:
        """Processes that this demo started and that live, by name."""
        return {name: pid for pid in all_pids() if (name := self._name_of(pid))}

    def _name_of(self, pid: int) -> str:
        words = command_line(pid)
        if "flashrt_ros.node.demo.child" not in words or str(self.process.pid) not in words:
            return ""
        module, rest = words[4].rpartition(".")[2], words[5:]
        return {"main": "policy", "robot": "robot"}.get(module) or f"camera_{rest[0]}"


def all_pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def command_line(pid: int) -> list[str]:
    """Words of the command; none for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {LIMIT:.0f} s"
        time.sleep(0.05)


@contextmanager
def running_demo(out: Path, *arguments: str) -> Iterator[Demo]:
    """A demo that is ended in any case, with all that it started, and whose shared memory is removed."""
    command = [sys.executable, "-m", "flashrt_ros.cli", "demo", "--out", str(out), *arguments]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=out.parent
    )
    demo = Demo(process, out)
    try:
        yield demo
    finally:
        segments = segments_of([process.pid, *demo.children().values()])
        process.kill()
        process.communicate()
        eventually(lambda: not demo.children())
        remove_segments(segments)


def segments_of(pids: list[int]) -> set[str]:
    return set().union(*(mapped_segments(pid) for pid in pids))


def left_over(segments: set[str]) -> set[str]:
    """Which of the demo's own `segments` still lie in shared memory although no process uses them.

    The first port of a domain is 7400. Those below belong to all domains of a machine: the demo leaves one that another
    test's process uses at its end, and that process may have ended by now.
    """
    own = {name for name in segments if not re.fullmatch(r"fastrtps_port7[0-3]\d\d", name)}
    return {name for name in own - segments_of(all_pids()) if (FOLDER / name).exists()}


# --- A run to its end


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    with running_demo(tmp_path_factory.mktemp("demo") / "out", "--seconds", "6") as demo:
        code, output, errors = demo.finish()
    assert code == 0, output + errors
    assert "stale replays" in output
    return demo


@pytest.fixture(scope="module")
def summary(finished: Demo) -> dict[str, object]:
    loaded: dict[str, object] = json.loads((finished.out / "summary.json").read_text())
    return loaded


def test_the_summary_has_exactly_the_promised_keys(summary: dict[str, object]) -> None:
    assert set(summary) == {
        "chunks", "rate_hz", "latency_ms", "age_ms", "refused", "stale_replays", "epochs", "bytes_copied_per_frame",
        "fingerprint",
    }  # fmt: skip
    assert set(summary["latency_ms"]) == {"p50", "p95", "p99"}  # type: ignore[call-overload]
    assert set(summary["age_ms"]) == {"p50", "p99"}  # type: ignore[call-overload]


def test_chunks_followed_both_instructions_and_none_used_stale_data(summary: dict[str, object]) -> None:
    assert isinstance(summary["chunks"], int)
    assert summary["chunks"] > 5
    assert summary["epochs"] == 2
    assert summary["stale_replays"] == 0


def test_a_frame_is_copied_once(summary: dict[str, object]) -> None:
    assert summary["bytes_copied_per_frame"] == 640 * 480 * 3


def test_the_fingerprint_is_that_of_the_configured_policy(summary: dict[str, object]) -> None:
    parameters = yaml.safe_load((ROOT / "config" / "pi05_tiny.yaml").read_text())["/**"]["ros__parameters"]
    settings = [f"--set={name}={value}" for name, value in parameters["policy"].items() if name != "name"]
    command = [sys.executable, "-m", "flashrt_ros.cli", "contract", "show", *settings]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT).stdout
    assert re.fullmatch("[0-9a-f]{64}", str(summary["fingerprint"]))
    assert str(summary["fingerprint"]) in shown


def test_the_report_shows_chunks_of_both_instructions(finished: Demo) -> None:
    picture = cv2.imread(str(finished.out / "report.png"))
    assert picture is not None
    height, width = picture.shape[:2]
    assert (height, width) == (1100, 1760)
    joints = picture[height // 5 : 3 * height // 5, width // 4 :].astype(int)
    blue, green, red = np.moveaxis(joints, -1, 0)
    teal, orange = (green - red > 40) & (blue - red > 30), (red - blue > 60) & (red - green > 20)
    assert teal.sum() > 1000
    assert orange.sum() > 1000
    assert ((red < 80) & (green < 80) & (blue < 80)).sum() > 1000  # what the robot measured


def test_nothing_is_left_running(finished: Demo) -> None:
    assert finished.children() == {}


# --- Every other end


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything(tmp_path: Path, number: signal.Signals) -> None:
    with running_demo(tmp_path / "out", "--seconds", "600") as demo:
        demo.read_until("chunks/s")
        assert set(demo.children()) == CHILDREN
        segments = segments_of(list(demo.children().values()))
        demo.process.send_signal(number)
        code, output, errors = demo.finish()
        assert (code, errors) == (128 + number, "")
        assert f"ended by {number.name}" in output
        assert demo.children() == {}
        assert segments
        assert left_over(segments) == set()


def test_a_signal_while_everything_starts_ends_everything(tmp_path: Path) -> None:
    with running_demo(tmp_path / "out", "--seconds", "600") as demo:
        demo.read_until("starting")
        demo.process.send_signal(signal.SIGINT)
        code, _, _ = demo.finish()
        assert code == 130
        assert demo.children() == {}


@pytest.mark.parametrize("victim", ["camera_wrist", "policy"])
def test_a_child_that_is_killed_ends_the_demo_with_one_line(tmp_path: Path, victim: str) -> None:
    with running_demo(tmp_path / "out", "--seconds", "600") as demo:
        demo.read_until("chunks/s")
        segments = segments_of(list(demo.children().values()))
        os.kill(demo.children()[victim], signal.SIGKILL)
        code, _, errors = demo.finish()
        assert code == 1
        assert re.fullmatch(rf"flashrt demo: process '{victim}' was ended by SIGKILL: .*\n", errors)
        assert demo.children() == {}
        assert left_over(segments) == set()


def test_children_do_not_outlive_a_parent_that_is_killed(tmp_path: Path) -> None:
    with running_demo(tmp_path / "out", "--seconds", "600") as demo:
        demo.read_until("chunks/s")
        segments = segments_of([demo.process.pid])
        demo.process.kill()
        eventually(lambda: demo.children() == {})
        assert segments  # the children have removed their own, and nobody is left to remove the parent's
        remove_segments(segments)


def test_a_parameter_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with running_demo(tmp_path / "out", "--params", "nowhere.yaml") as demo:
        code, _, errors = demo.finish()
        assert code == 1
        assert errors == "flashrt demo: the parameter file nowhere.yaml does not exist\n"


def test_a_policy_that_cannot_configure_ends_the_demo_with_its_reason(tmp_path: Path) -> None:
    params = tmp_path / "wrong.yaml"
    params.write_text("/**:\n  ros__parameters:\n    policy:\n      name: pi06\n")
    with running_demo(tmp_path / "out", "--params", str(params)) as demo:
        code, _, errors = demo.finish()
        assert code == 1
        assert re.fullmatch(r"flashrt demo: the policy node could not start: configure failed: .*pi06.*\n", errors)
        assert demo.children() == {}


def test_an_output_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("in the way")
    with running_demo(tmp_path / "out") as demo:
        code, _, errors = demo.finish()
        assert code == 1
        assert str(tmp_path / "out") in errors
        assert errors.count("\n") == 1
