"""Parts of the demo: photographs, processes, shared memory, summary, picture."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import cv2
import numpy as np
import pytest
from rich.console import Console

from flashrt_ros.node.demo.camera import scenery
from flashrt_ros.node.demo.errors import DemoError
from flashrt_ros.node.demo.live import LiveLine, live_text, result_table
from flashrt_ros.node.demo.network import DOMAINS, own_domain
from flashrt_ros.node.demo.photographs import MovingCrop, load_photograph
from flashrt_ros.node.demo.processes import Processes
from flashrt_ros.node.demo.recording import ReceivedChunk, Recording, Refused, Status, StreamCounts
from flashrt_ros.node.demo.report import write_report
from flashrt_ros.node.demo.scene import CAMERAS, HEIGHT, INSTRUCTIONS, JOINTS, WIDTH, Camera
from flashrt_ros.node.demo.shared_memory import FOLDER, remove_segments
from flashrt_ros.node.demo.summary import summarise
from test.sources import checkout_environment

FINGERPRINT = "ab" * 32
MILLISECOND = 1_000_000


@pytest.mark.parametrize("camera", CAMERAS, ids=lambda camera: camera.view)
@pytest.mark.parametrize("card", [False, True], ids=["photograph", "card"])
def test_the_crop_moves_and_stays_within_the_picture(camera: Camera, card: bool) -> None:
    picture = scenery(camera, card=card)
    crop = MovingCrop(picture, WIDTH, HEIGHT)
    frames = [crop.at(seconds).copy() for seconds in np.arange(0.0, 20.0, 0.37)]
    assert {frame.shape for frame in frames} == {(HEIGHT, WIDTH, 3)}
    assert all((one != other).any() for one, other in itertools.pairwise(frames))


@pytest.mark.parametrize("card", [False, True], ids=["photograph", "card"])
def test_a_camera_films_in_the_channel_order_that_it_publishes(card: bool) -> None:
    front = CAMERAS[0]
    assert front.encoding == "rgb8"
    reordered = scenery(dataclasses.replace(front, encoding="bgr8"), card=card)
    assert np.array_equal(scenery(front, card=card), reordered[:, :, ::-1])


def test_a_test_card_needs_no_opencv() -> None:
    program = "import sys; sys.modules['cv2'] = None; from flashrt_ros.node.demo.photographs import colour_card"
    check = "; assert colour_card(64, 48).shape == (48, 64, 3); assert colour_card(64, 48).std() > 40"
    subprocess.run([sys.executable, "-c", program + check], check=True, env=checkout_environment(), timeout=60)


def test_the_photograph_is_in_rgb_order() -> None:
    coffee = load_photograph("coffee.png")
    red, _, blue = coffee.reshape(-1, 3).mean(0)
    assert red > blue  # a red cup on brown wood


def test_a_photograph_that_is_missing_is_named() -> None:
    with pytest.raises(DemoError, match=r"nowhere\.png.*reinstall"):
        load_photograph("nowhere.png")


def test_joint_positions_and_velocities_agree() -> None:
    step = 1e-4
    for joint in JOINTS:
        (before, _), (_, velocity), (after, _) = (joint.at(3.0 + offset) for offset in (-step, 0.0, step))
        assert velocity == pytest.approx((after - before) / (2 * step), rel=1e-4, abs=1e-6)


def test_two_holders_get_two_domains() -> None:
    with own_domain() as one, own_domain() as other:
        assert one != other
        assert {one, other} <= set(DOMAINS)


# --- Processes


def runs(pid: int) -> bool:
    """Whether the process exists and is no zombie: a zombie has no command line."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except FileNotFoundError:
        return False


def write_module(folder: Path, statements: str) -> dict[str, str]:
    """Make a module `child_module` with that `main()`; returns an environment in which it can be imported."""
    (folder / "child_module.py").write_text(f"def main():\n    {statements}\n")
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def eventually(condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds; a test that waits 30 s has failed."""
    deadline = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline, "it did not happen within 30 s"
        time.sleep(0.01)


def has_line(log: Path) -> bool:
    return log.exists() and "\n" in log.read_text()


def test_a_child_that_ends_is_named_with_its_last_line(tmp_path: Path) -> None:
    environment = write_module(tmp_path, "raise SystemExit('the lens is missing')")
    with Processes(environment, tmp_path / "logs") as processes:
        processes.start("camera", "child_module")
        eventually(lambda: has_line(tmp_path / "logs" / "camera.log"))
        eventually(lambda: not all(child.alive for child in processes.children))
        with pytest.raises(DemoError, match=r"process 'camera' ended with code 1: the lens is missing \(log: "):
            processes.check()


def test_a_child_that_ignores_sigint_is_killed_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashrt_ros.node.demo.processes.GRACE", 0.2)
    text = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('deaf'); time.sleep(600)"
    processes = Processes(write_module(tmp_path, text), tmp_path / "logs")
    processes.start("deaf", "child_module")
    eventually(lambda: has_line(tmp_path / "logs" / "deaf.log"))
    assert processes.stop() == ["deaf"]


def test_a_child_dies_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    environment = write_module(tmp_path, "import os, time; print(os.getpid()); time.sleep(600)")
    parent_text = (
        "import os, pathlib, time\n"
        "from flashrt_ros.node.demo.processes import Processes\n"
        f"Processes(dict(os.environ), pathlib.Path({str(tmp_path)!r})).start('child', 'child_module')\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", parent_text], env=environment)
    eventually(lambda: has_line(tmp_path / "child.log"))
    child = int((tmp_path / "child.log").read_text())
    parent.kill()
    parent.wait()
    eventually(lambda: not runs(child))


def test_shared_memory_is_kept_while_a_process_uses_it() -> None:
    name = f"fastrtps_test_{os.getpid()}"
    path = FOLDER / name
    try:
        segment = np.memmap(path, np.uint8, "w+", shape=(4096,))
        (FOLDER / f"{name}_el").touch()
        assert remove_segments([name]) == []
        assert remove_segments([name], disregard=os.getpid()) == [name, f"{name}_el"]
        del segment
        assert not path.exists()
    finally:
        path.unlink(missing_ok=True)


# --- The terminal


def test_the_live_line_tells_rate_latency_ages_and_instruction() -> None:
    recording = make_recording([make_chunk(index) for index in range(20)])
    text = live_text(recording, recording.chunks[-1].arrival, 4.0)
    assert text.split("  ·  ") == [
        " 2.0/4 s", "10.3 chunks/s", "latency  50 ms", "age  70 ms", 'epoch 2 "stroke the cat"', "inputs front 20 ms",
    ]  # fmt: skip


def test_before_the_first_chunk_the_live_line_tells_what_the_node_waits_for() -> None:
    recording = Recording()
    assert live_text(recording, 0, 4.0).startswith("starting")
    recording.status = make_status(state="inactive", reason="activate it")
    assert live_text(recording, 0, 4.0) == "policy node inactive: activate it"


@pytest.mark.parametrize(("terminal", "lines"), [(True, 1), (False, 3)])
def test_the_live_line_is_rewritten_on_a_terminal_and_repeated_in_a_log(terminal: bool, lines: int) -> None:
    console = Console(file=StringIO(), force_terminal=terminal, width=80)
    with LiveLine(console) as line:
        for second in range(3):
            line.show(f"second {second}", float(second))
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    assert text.count("\n") == lines
    assert "second 2" in text


def test_the_table_tells_why_something_was_refused() -> None:
    recording = make_recording([make_chunk(index) for index in range(20)])
    console = Console(file=StringIO(), width=120)
    console.print(result_table(recording, summarise(recording), {"report": Path("report.png")}))
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    assert "2 × front: too old" in text
    assert "report.png" in text


# --- Summary and picture


def make_chunk(index: int, **changes: object) -> ReceivedChunk:
    """A chunk every 100 ms that took 50 ms and used observations of 20 ms before."""
    start = (1_000_000 + 100 * index) * MILLISECOND
    fields: dict[str, object] = {
        "arrival": start + 50 * MILLISECOND,
        "stamp": start,
        "dt": 50 * MILLISECOND,
        "oldest_observation": start - 20 * MILLISECOND,
        "inference_start": start,
        "inference_duration": 45 * MILLISECOND,
        "epoch": 1 + (index >= 10),
        "chunk_id": index + 1,
        "joint_names": tuple(joint.name for joint in JOINTS),
        "data": np.full((4, len(JOINTS)), 0.01 * index, np.float32),
        "instruction": INSTRUCTIONS[index >= 10],
        "fingerprint": FINGERPRINT,
    }
    return ReceivedChunk(**{**fields, **changes})  # type: ignore[arg-type]


def make_status(**changes: object) -> Status:
    fields: dict[str, object] = {
        "state": "active",
        "reason": "",
        "policy": "pi05",
        "checkpoint": "preset:pi05_tiny",
        "precision": "float32",
        "device": "cpu",
        "fingerprint": FINGERPRINT,
        "instruction": INSTRUCTIONS[1],
        "chunks_published": 20,
        "ticks_skipped": 0,
        "stale_replays": 0,
        "session_p50": 0.045,
        "bytes_copied_per_frame": 921_600,
        "replays": (("prompt", "prompt", 2), ("context", "observation", 20)),
        "streams": (StreamCounts("front", 30.0, 0.02, 60, 20),),
        "refusals": (Refused("front", 6, 7, "too old"), Refused("chunk", 60, 1, "epoch 1 ended")),
    }
    return Status(**{**fields, **changes})  # type: ignore[arg-type]


def make_recording(chunks: list[ReceivedChunk]) -> Recording:
    """A run in which, since its start, two frames and one chunk were refused."""
    recording = Recording(1_000_000 * MILLISECOND, chunks, status=make_status())
    recording.first_status = make_status(refusals=(Refused("front", 6, 5, "too old"),))
    recording.instructions = [(0, INSTRUCTIONS[0]), (1_001_000 * MILLISECOND, INSTRUCTIONS[1])]
    return recording


def test_the_summary_is_computed_from_what_arrived() -> None:
    assert summarise(make_recording([make_chunk(index) for index in range(20)])) == {
        "chunks": 20,
        "rate_hz": 10.0,
        "latency_ms": {"p50": 50.0, "p95": 50.0, "p99": 50.0},
        "age_ms": {"p50": 70.0, "p99": 70.0},
        "refused": 3,
        "stale_replays": 0,
        "epochs": 2,
        "bytes_copied_per_frame": 921_600,
        "fingerprint": FINGERPRINT,
    }


def test_chunks_that_contradict_each_other_make_no_summary() -> None:
    with pytest.raises(DemoError, match="strictly increasing"):
        summarise(make_recording([make_chunk(0), make_chunk(1, chunk_id=1)]))
    with pytest.raises(DemoError, match="different contracts"):
        summarise(make_recording([make_chunk(0), make_chunk(1, fingerprint="cd" * 32)]))


def test_no_chunk_is_told_with_the_nodes_reason() -> None:
    recording = make_recording([])
    recording.status = make_status(reason="no instruction; publish one")
    with pytest.raises(DemoError, match=r"published no chunk \(no instruction; publish one\)"):
        summarise(recording)


def test_the_picture_shows_both_instructions(tmp_path: Path) -> None:
    recording = make_recording([make_chunk(index) for index in range(20)])
    write_report(recording, summarise(recording), tmp_path / "report.png")
    picture = cv2.imread(str(tmp_path / "report.png"))
    assert picture is not None
    for blue, green, red in ((0x75, 0x7A, 0x0B), (0x20, 0x6B, 0xDD)):  # of the two instructions' chunks
        assert np.all(np.abs(picture.astype(int) - (blue, green, red)) < 12, axis=-1).sum() > 50


def test_a_joint_of_a_chunk_need_not_be_measured(tmp_path: Path) -> None:
    chunks = [make_chunk(0, joint_names=("only",), data=np.zeros((4, 1), np.float32))]
    recording = make_recording(chunks)
    write_report(recording, summarise(recording), tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 10_000
