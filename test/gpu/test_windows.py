"""Windows on a real GPU: uploaded or read in place, the bits are equal, and nothing is overwritten while it is read."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np
import pytest
import torch

from flashrt_ros.contract import Variant
from flashrt_ros.engine import Session, WindowPath
from flashrt_ros.engine.windows import is_integrated
from flashrt_ros.policies import PolicyRunner
from test.contract.builders import make_contract
from test.engine.toy import BODIES, expected, image, tokens
from test.policies.pi05.tiny import INSTRUCTION, look, small_policy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
BOTH = (WindowPath.PINNED, WindowPath.MAPPED)


def session_of(path: WindowPath | None, bodies: Mapping[str, object] = BODIES) -> Session:
    session = Session(make_contract(), bodies, "cuda", seed=3, windows=path)  # type: ignore[arg-type]
    session.configure()
    session.fill("image", image(1))
    session.fill("tokens", tokens(5, 6, 7, 8))
    session.draw()
    return session


def slow_context(buffers: Mapping[str, torch.Tensor], variant: Variant) -> None:
    """Reads the image only after a long wait on the device."""
    torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
    BODIES["context"](buffers, variant)


def test_the_path_follows_the_memory_that_the_device_has() -> None:
    device = torch.device("cuda", 0)
    chosen = WindowPath.MAPPED if is_integrated(device) else WindowPath.PINNED
    assert session_of(None).window_path("image") is chosen


def test_a_mapped_window_has_one_address_for_host_and_device() -> None:
    session = session_of(WindowPath.MAPPED)
    assert session.window_path("image") is WindowPath.MAPPED
    assert session.arena.address("image") == session.host_address("image")
    assert session.arena["image"].device.type == "cuda"


def test_both_paths_give_equal_bits_over_many_decisions() -> None:
    bits = dict.fromkeys(BOTH, b"")
    for path in BOTH:
        session = session_of(path)
        for step in range(5):
            session.fill("image", image(step))
            session.draw()
            session.act()
            bits[path] += session.read("actions").tobytes()
    assert bits[BOTH[0]] == bits[BOTH[1]]


@pytest.mark.parametrize("path", BOTH)
def test_a_window_is_not_overwritten_while_a_replay_reads_it(path: WindowPath) -> None:
    session = session_of(path, {**BODIES, "context": slow_context})
    noise = session.read("noise")
    session.act()
    session.fill("image", image(200))  # the replay before has not read its image yet
    seen = session.arena["actions"].cpu().numpy()
    np.testing.assert_allclose(seen, expected(image(1), tokens(5, 6, 7, 8), noise), rtol=1e-6)
    session.act()
    np.testing.assert_allclose(session.read("actions"), expected(image(200), tokens(5, 6, 7, 8), noise), rtol=1e-6)


@pytest.mark.parametrize("path", BOTH)
def test_a_thread_that_never_used_the_device_can_fill_and_read(path: WindowPath) -> None:
    session, found = session_of(path), list[np.ndarray]()
    noise = session.read("noise")

    def drive() -> None:
        session.fill("image", image(9))
        session.act()
        found.append(session.read("actions"))

    thread = threading.Thread(target=drive)
    thread.start()
    thread.join()
    np.testing.assert_allclose(found[0], expected(image(9), tokens(5, 6, 7, 8), noise), rtol=1e-6)


@pytest.mark.parametrize("path", BOTH)
def test_another_stream_does_not_make_a_window_forget_what_still_reads_it(path: WindowPath) -> None:
    session = session_of(path, {**BODIES, "context": slow_context})
    noise = session.read("noise")
    session.act()
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        session.read("actions")  # finishes this stream, which says nothing of the one that replays
    session.fill("image", image(200))
    seen = session.arena["actions"].cpu().numpy()
    np.testing.assert_allclose(seen, expected(image(1), tokens(5, 6, 7, 8), noise), rtol=1e-6)


def test_a_part_of_a_window_is_uploaded_alone() -> None:
    session = session_of(WindowPath.PINNED)
    with session.window("image", rows=3) as part:
        part[:] = 200
    assert session.arena["image"].cpu().tolist() == [200, 200, 200, 1, 1, 1, 1, 1]
    session.fill("image", image(7))
    assert session.arena["image"].cpu().tolist() == [7] * 8


@pytest.mark.parametrize("path", BOTH)
def test_pi05_gives_the_same_bits_and_its_capsules_restore(path: WindowPath) -> None:
    def started(windows: WindowPath) -> PolicyRunner:
        runner = PolicyRunner.start(small_policy("cuda"), "cuda", 5, windows=windows)
        look(runner)
        runner.set_instruction(INSTRUCTION)
        return runner

    runner, other = started(path), started(WindowPath.PINNED)
    assert runner.session.window_path("image.front") is path
    assert np.array_equal(runner.decide().actions, other.decide().actions)
    runner.session.snapshot("here")
    after = runner.decide().actions
    look(runner, 9)
    runner.decide()
    runner.session.restore("here")
    look(runner)
    assert np.array_equal(runner.decide().actions, after)
