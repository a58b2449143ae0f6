"""π0.5 on a real GPU: the references are captured as graphs and agree with the CPU and with LeRobot."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flashrt_ros.engine import DeviceError
from flashrt_ros.policies import PolicyRunner
from flashrt_ros.policies.pi05 import build
from flashrt_ros.policies.pixels import PixelOrder
from test.policies.pi05.golden import CASES, VIEWS, Case, settings
from test.policies.pi05.tiny import INSTRUCTION, frame, look, small_policy, started

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

LONGER = "pick up the red cup and put it down next to the plate, then stop and hold it"


def seeded_chunk(runner: PolicyRunner) -> np.ndarray:
    runner.session.seed(3)
    return runner.decide().actions


def test_the_gpu_agrees_with_the_cpu() -> None:
    np.testing.assert_allclose(seeded_chunk(started("cuda")), seeded_chunk(started("cpu")), atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_full_and_split_plans_give_equal_bits(dtype: str) -> None:
    split, full = started("cuda", plan="split", dtype=dtype), started("cuda", plan="full", dtype=dtype)
    for seed in range(3):
        for runner in (split, full):
            look(runner, seed)
        assert np.array_equal(seeded_chunk(split), seeded_chunk(full))


def test_one_graph_serves_every_format_and_prompt() -> None:
    gpu, cpu = started("cuda"), started("cpu")
    for instruction in (INSTRUCTION, LONGER, "go"):
        for size, order in (((48, 64), PixelOrder.RGB), ((31, 17), PixelOrder.BGR)):
            for runner in (gpu, cpu):
                runner.set_instruction(instruction)
                runner.set_image("wrist", frame(1, *size), order)
            np.testing.assert_allclose(seeded_chunk(gpu), seeded_chunk(cpu), atol=1e-4)


def test_a_configuration_that_does_not_fit_is_refused_before_it_is_loaded() -> None:
    before = torch.cuda.memory_reserved()
    with pytest.raises(DeviceError, match=r"policy 'pi05' with 2 views takes about \d+\.\d GiB on 'cuda', which has"):
        small_policy("cuda", max_pixels=1 << 40)
    assert torch.cuda.memory_reserved() == before


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"case{case.index}")
def test_official_parity(case: Case) -> None:
    runner = PolicyRunner.start(build(settings(), "cuda"), "cuda")
    for view in VIEWS:
        runner.set_image(view, case[f"image.{view}"], PixelOrder.RGB)
    runner.set_state(case["state"])
    runner.set_instruction(case.task)
    runner.decide()
    runner.session.fill("noise", case["noise"])
    runner.session.act()
    official = case["actions.10"]
    flow = official - case["noise"]
    assert np.linalg.norm(runner.session.read("actions") - official) < 1e-4 * np.linalg.norm(flow)
