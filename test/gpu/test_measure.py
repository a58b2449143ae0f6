"""Measuring on a GPU: graphs that own what they read, kernels that are counted, LeRobot built on the device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from flashrt_ros.measure.parity import cosine
from flashrt_ros.measure.pi05.baselines import PLAIN_COMPILED, PLAIN_GRAPH, Shared, baselines
from flashrt_ros.measure.pi05.bench import Options, bench
from flashrt_ros.measure.pi05.subject import Case, Subject
from flashrt_ros.measure.pi05.verify import Plan, verify
from flashrt_ros.measure.rounds import Schedule
from flashrt_ros.measure.trace import figures
from flashrt_ros.policies.pi05.settings import resolve
from test.measure.tiny import pictures, settings, write_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]
SCHEDULE = Schedule(rounds=2, calls=5, turn_s=0.1, warm_up_s=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "checkpoint")


@pytest.fixture(scope="module")
def subject(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    case = Case(views=2, chunk=4, tokens=111).settings(settings(folder), tmp_path_factory.mktemp("cut") / "c")
    return Subject(case, "cuda", pictures())


def test_captured_baselines_outlive_everything_that_built_them(subject: Subject) -> None:
    config, observation = subject.policy.config, subject.observation()
    shared = Shared(config, Path(subject.policy.checkpoint), torch.device("cuda"), observation)
    with baselines((PLAIN_GRAPH, PLAIN_COMPILED), shared) as built:
        filler = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(64)]
        subject.replay()
        own = subject.actions() - observation.noise
        for baseline in built:
            baseline.run()
            assert cosine(baseline.actions() - observation.noise, own) > 0.9999, baseline.name
        assert len(filler) == 64


def test_the_kernels_of_a_replay_are_counted(subject: Subject) -> None:
    found = figures(subject.trace())
    assert found.kernels > found.gemms > 50
    assert found.kernel_ms > 0
    assert 0 <= found.gap_ms < found.span_ms


def test_a_result_from_a_gpu_counts_kernels_and_sees_the_card(folder: Path, tmp_path: Path) -> None:
    case = Case(1, 4, 111).settings(settings(folder), tmp_path / "c")
    result = bench(case, Options("cuda", SCHEDULE, (PLAIN_GRAPH,), mechanisms=True), pictures(), lambda text: None)
    assert result["kernels"] > 50
    assert result["baseline_kernels"][PLAIN_GRAPH] > 50
    assert min(result["pairs"]["mapped_windows"]) > 0
    assert result["gpu"] is None or result["gpu"]["power_w"]["max"] > 0
    assert sum(result["stage_ms"].values()) == pytest.approx(result["replay_ms"]["p50"], rel=0.5)


def test_parity_on_the_gpu(folder: Path) -> None:
    pytest.importorskip("lerobot")
    given = settings(folder)
    plan = Plan(given, "cuda", views=(1, 2), steps=(1, 2), observations=4)
    report = verify(plan, pictures(), resolve(given).config)
    assert report["failures"] == []
    assert report["steps"]["2"]["ours"]["relative_error"] < 1e-4
    assert np.isfinite(report["steps"]["2"]["official bfloat16"]["relative_error"])
