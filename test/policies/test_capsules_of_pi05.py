"""Capsules of a real policy: equal bits, live rows only, and an image that is never taken for another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flashrt_ros.engine import CapsuleFolder, SessionManager, UnfilledWindowError
from flashrt_ros.policies import Policy, PolicyRunner, build_policy
from flashrt_ros.policies.pixels import PixelOrder

RANDOM = np.random.default_rng(3)
FRAMES = RANDOM.integers(0, 256, (6, 48, 64, 3), dtype=np.uint8)
SHORT, LONG = "pick up the cup", "put the red cup onto the blue plate beside the sink, slowly and without spilling it"


@pytest.fixture(scope="module")
def policy() -> Policy:
    return build_policy("pi05", {"preset": "pi05_tiny"})


@pytest.fixture
def runner(policy: Policy) -> PolicyRunner:
    runner = PolicyRunner.start(policy, seed=11)
    runner.set_state(np.zeros(len(policy.state_names), np.float32))
    return runner


def decide(runner: PolicyRunner, instruction: str, frame: int) -> bytes:
    for view in runner.policy.views:
        runner.set_image(view, FRAMES[frame], PixelOrder.RGB)
    runner.set_instruction(instruction)
    return runner.decide().actions.tobytes()


def test_switching_to_another_task_and_back_gives_the_bits_of_never_having_left(runner: PolicyRunner) -> None:
    decide(runner, SHORT, 0)
    runner.session.snapshot("cup")
    undisturbed = [decide(runner, SHORT, frame) for frame in (1, 2)]
    decide(runner, LONG, 3)
    runner.session.restore("cup")
    assert runner.instruction == SHORT
    assert [decide(runner, SHORT, frame) for frame in (1, 2)] == undisturbed


def test_a_restored_task_decides_at_once_from_its_saved_context(runner: PolicyRunner) -> None:
    decide(runner, SHORT, 0)
    runner.session.snapshot("cup")
    decide(runner, LONG, 1)
    runner.session.restore("cup")
    assert runner.decide().replayed == ("action",)


def test_a_new_instruction_after_a_restore_demands_new_images(runner: PolicyRunner) -> None:
    decide(runner, SHORT, 0)
    runner.session.snapshot("cup")
    decide(runner, LONG, 1)
    runner.session.restore("cup")
    runner.set_instruction(LONG)
    with pytest.raises(UnfilledWindowError, match=r"image\.front"):
        runner.decide()
    assert decide(runner, LONG, 2)


def test_only_live_rows_are_saved(runner: PolicyRunner) -> None:
    decide(runner, SHORT, 0)
    short = runner.session.snapshot("short")
    decide(runner, LONG, 0)
    long = runner.session.snapshot("long")
    everything = sum(region.nbytes for region in runner.policy.contract.regions)
    assert short.nbytes < long.nbytes < everything
    rows = runner.session.extents["prefix_rows"] - short.state.extents["prefix_rows"]
    kv = runner.policy.contract.buffer("key_value")
    embedding = runner.policy.contract.buffer("prompt_embedding")
    bytes_per_row = kv.nbytes // kv.shape[2] + embedding.nbytes // embedding.shape[0]
    assert abs(long.nbytes - short.nbytes - rows * bytes_per_row) < 16 * len(runner.policy.contract.regions)


def test_two_runners_fork_one_capsule_and_diverge(policy: Policy, runner: PolicyRunner) -> None:
    decide(runner, SHORT, 0)
    runner.session.snapshot("start")
    reference = decide(runner, SHORT, 1)
    twin = PolicyRunner.start(policy, seed=99)
    twin.set_state(np.zeros(len(policy.state_names), np.float32))
    runner.session.fork("start", twin.session)
    assert decide(twin, SHORT, 1) == reference
    runner.session.restore("start")
    assert decide(runner, LONG, 1) != reference


def test_tasks_that_share_one_working_set_do_not_disturb_each_other(policy: Policy, runner: PolicyRunner) -> None:
    manager = SessionManager(runner.session)
    manager.open("other")
    got: dict[str, list[bytes]] = {"main": [], "other": []}
    for frame in range(3):
        for name, text in (("main", SHORT), ("other", LONG)):
            with manager.use(name):
                got[name].append(decide(runner, text, frame))
    for name, text in (("main", SHORT), ("other", LONG)):
        alone = PolicyRunner.start(policy, seed=11)
        alone.set_state(np.zeros(len(policy.state_names), np.float32))
        assert [decide(alone, text, frame) for frame in range(3)] == got[name]


def test_a_file_brings_the_task_back_in_a_later_process(policy: Policy, runner: PolicyRunner, tmp_path: Path) -> None:
    folder = CapsuleFolder(tmp_path)
    decide(runner, SHORT, 0)
    folder.save(runner.session.snapshot("cup"))
    undisturbed = decide(runner, SHORT, 1)
    later = PolicyRunner.start(build_policy("pi05", {"preset": "pi05_tiny"}), seed=5)
    later.set_state(np.zeros(len(policy.state_names), np.float32))
    later.session.capsules.insert(folder.load("cup"))
    later.session.restore("cup")
    assert later.instruction == SHORT
    assert decide(later, SHORT, 1) == undisturbed
