"""The fused π0.5 stages against the references: distances, equal bits between plans, refusals."""

from __future__ import annotations

import pytest
import torch

from flashrt_ros.ops import reference_ops
from flashrt_ros.ops.cuda import rows as kernels
from flashrt_ros.ops.cuda.errors import KernelError
from flashrt_ros.ops.cuda.expert import ExpertKernel
from flashrt_ros.ops.report import KernelReport
from flashrt_ros.policies.pi05.cuda_plan import FUSED, PARTS, ChosenStages, choose_stages
from flashrt_ros.policies.pi05.cuda_stages import CudaStages
from flashrt_ros.policies.pi05.stages import Pi05Stages
from test.gpu.fused import DEVICE, NEEDS_KERNELS, Model, decide, distance, model, reference

pytestmark = NEEDS_KERNELS


def chosen(made: Model, **switches: bool) -> tuple[Pi05Stages, tuple[KernelReport, ...]]:
    return choose_stages(made.config, made.weights, reference_ops(), made.contract, DEVICE, **switches)


@pytest.mark.parametrize("chunk", [10, 16, 30, 50])
def test_every_part_is_fused_and_as_close_to_float32_as_the_reference(chunk: int) -> None:
    made, exact = model(chunk=chunk), model("float32", chunk)
    stages, reports = chosen(made)
    assert [(report.op, report.kernel, report.reason) for report in reports] == [(part, FUSED, "") for part in PARTS]
    for seed, tokens in ((1, 190), (2, 33), (3, 200)):
        truth = decide(reference(exact), exact, seed, tokens)
        plain, fused = decide(reference(made), made, seed, tokens), decide(stages, made, seed, tokens)
        for part in PARTS:
            assert distance(fused[part], truth[part]) <= 1.15 * distance(plain[part], truth[part]) + 1e-4, part


@pytest.mark.parametrize(("persistent", "overlap"), [(True, True), (False, False), (False, True)])
@pytest.mark.parametrize("chunk", [10, 50])
def test_all_ways_to_launch_give_equal_bits(persistent: bool, overlap: bool, chunk: int) -> None:
    made = model(chunk=chunk)
    usual, other = chosen(made)[0], chosen(made, persistent=persistent, overlap=overlap)[0]
    for seed in range(3):
        expected, got = decide(usual, made, seed), decide(other, made, seed)
        assert all(torch.equal(got[part], expected[part]) for part in PARTS)


@pytest.mark.parametrize(("chunk", "blocks"), [(10, 20), (50, 20), (10, 100), (33, 128)])
def test_a_smaller_grid_gives_equal_bits(chunk: int, blocks: int) -> None:
    made = model(chunk=chunk)
    usual, other = chosen(made)[0], chosen(made)[0]
    assert isinstance(other, CudaStages)
    other._expert = ExpertKernel(other._expert.weights, chunk, made.config.steps, blocks=blocks)
    expected, got = decide(usual, made), decide(other, made)
    assert torch.equal(got["expert"], expected["expert"])


def test_replays_of_one_graph_give_equal_bits() -> None:
    made = model()
    stages = chosen(made)[0]
    arena, variant = made.arena()
    with torch.inference_mode():
        for _ in range(2):
            for body in (stages.checkpoint, stages.prompt, stages.full):
                body(arena, variant)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            stages.full(arena, variant)
    graph.replay()
    first = arena["actions"].clone()
    assert torch.isfinite(first).all()
    for _ in range(200):
        arena["actions"].fill_(float("nan"))
        graph.replay()
        assert torch.equal(arena["actions"], first)


def test_rows_behind_the_prompt_do_not_matter() -> None:
    made = model()
    stages = chosen(made)[0]
    results = []
    for behind in (0.0, 100.0):
        arena, variant = made.arena(tokens=150)
        with torch.inference_mode():
            stages.checkpoint(arena, variant)
            stages.prompt(arena, variant)
            arena["prompt_embedding"][150:].fill_(behind)
            stages.full(arena, variant)
        results.append(arena["actions"].clone())
    assert torch.equal(*results)


def test_a_part_that_fails_its_self_test_runs_as_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(gate_up: torch.Tensor, *, out: torch.Tensor, **_: object) -> None:
        out.zero_()

    monkeypatch.setattr(kernels, "geglu", wrong)
    made = model()
    stages, reports = chosen(made)
    assert [report.kernel for report in reports] == [FUSED, "reference", FUSED]
    assert reports[1].fallback
    assert "self-test" in reports[1].reason
    got, expected = decide(stages, made), decide(reference(made), made)
    assert distance(got["prefix"], expected["prefix"]) < 0.05


def test_a_part_that_does_not_run_runs_as_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KernelError("no such instruction")

    monkeypatch.setattr(kernels, "layer_norm", broken)
    stages, reports = chosen(model())
    assert reports[0].reason == "did not run: no such instruction"
    assert isinstance(stages, ChosenStages)
    assert stages.refused == {"vision"}


def test_what_the_kernels_are_not_written_for_is_refused_with_a_reason() -> None:
    stages, reports = chosen(model("float32"))
    assert type(stages) is Pi05Stages
    assert {report.reason for report in reports} == {
        "fused kernels compute in bfloat16, the policy is configured for float32"
    }
