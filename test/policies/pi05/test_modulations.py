"""The modulations of the adaptive norms: what the checkpoint stage makes, and an expert's kernel is prepared with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from flashrt_ros.engine import Session
from flashrt_ros.ops import reference_ops
from flashrt_ros.ops.cuda.errors import KernelError
from flashrt_ros.policies.pi05 import Pi05Policy, cuda_stages
from flashrt_ros.policies.pi05.cuda_stages import CudaStages
from flashrt_ros.policies.pi05.stages import Pi05Stages
from flashrt_ros.policies.pi05.weights import Dense

from .tiny import small_policy


@pytest.fixture(scope="module")
def policy() -> Pi05Policy:
    return small_policy()


def modulation_of(policy: Pi05Policy, bodies: Any = None) -> Tensor:
    """What a session has in its buffer."""
    session = Session(policy.contract, bodies or policy.bodies)
    session.configure()
    return torch.from_numpy(session.read("modulation"))


def applied(dense: Dense, x: Tensor) -> Tensor:
    return x @ dense.weight.double().t() + dense.bias.double()


def test_they_follow_from_weights_and_step_times_alone(policy: Pi05Policy) -> None:
    config, time = policy.config, policy.weights.time
    out = torch.full((config.steps, config.modulations, 3, config.expert_width), float("nan"))
    Pi05Stages(config, policy.weights, reference_ops()).modulate(out)
    condition = silu(applied(time.second, silu(applied(time.first, time.times.double()))))
    for site, dense in enumerate(time.modulations):
        expected = applied(dense, condition).view(config.steps, 3, config.expert_width)
        torch.testing.assert_close(out[:, site].double(), expected, rtol=1e-4, atol=1e-5)


def test_the_checkpoint_stage_makes_these(policy: Pi05Policy) -> None:
    out = torch.empty(policy.contract.buffer("modulation").shape)
    with torch.inference_mode():
        Pi05Stages(policy.config, policy.weights, reference_ops()).modulate(out)
    assert torch.equal(modulation_of(policy), out)


class Prepared:
    """In the place of an expert's kernel, which needs a GPU: what it was prepared with, and how float32 products were
    computed then."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.with_: list[tuple[Tensor, str]] = []

    def prepare(self, modulation: Tensor) -> None:
        self.with_.append((modulation.clone(), torch.get_float32_matmul_precision()))


def test_an_experts_kernel_is_prepared_once_when_the_stages_are_built(
    policy: Pi05Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_stages, "ExpertKernel", Prepared)
    monkeypatch.setattr(cuda_stages, "pack_expert", lambda weights, chunk: weights)
    torch.set_float32_matmul_precision("high")
    try:
        stages = CudaStages(policy.config, policy.weights, reference_ops(), fused_gate_up=False)
    finally:
        torch.set_float32_matmul_precision("highest")
    made = modulation_of(policy, {**policy.bodies, "checkpoint": stages.checkpoint})
    kernel: Any = stages._expert
    ((modulation, precision),) = kernel.with_
    assert torch.equal(modulation, made)
    assert precision == "highest"


def test_stages_without_a_kernel_make_the_same_modulations(policy: Pi05Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise KernelError("no")

    monkeypatch.setattr(cuda_stages, "pack_expert", refuse)
    stages = CudaStages(policy.config, policy.weights, reference_ops(), fused_gate_up=False)
    assert isinstance(stages._expert, KernelError)
    made = modulation_of(policy, {**policy.bodies, "checkpoint": stages.checkpoint})
    assert torch.equal(made, modulation_of(policy))
