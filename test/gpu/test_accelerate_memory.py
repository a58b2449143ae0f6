"""What graphs of an accelerated model read lives as long as they do, and who broke a GPU is named."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flashrt_ros.accelerate import Observation
from flashrt_ros.accelerate.graph import CapturedCall
from flashrt_ros.accelerate.structures.pi05 import _call
from test.benchmarks.scripts import module
from test.gpu.fused import DEVICE, NEEDS_KERNELS, distance
from test.gpu.short import short_pi05

pytestmark = NEEDS_KERNELS


def spoil_free_memory() -> list[Tensor]:
    """Whatever was given back is now unmapped, or holds what is not a number as long as the result lives."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    sizes = ((1 << 7, 4096), (1 << 14, 128), (1 << 18, 32), (1 << 23, 16))  # float32 values of a block, blocks
    blocks = [torch.full((size,), float("nan"), device=DEVICE) for size, count in sizes for _ in range(count)]
    torch.cuda.synchronize()
    return blocks


def test_a_graph_keeps_what_only_its_call_holds() -> None:
    x = torch.randn(64, 256, device=DEVICE)

    def product() -> Callable[[Tensor], Tensor]:
        weight = torch.ones(256, 256, device=DEVICE)
        return lambda x: x @ weight

    expected = product()(x)
    call = CapturedCall(product(), ((x,), {}), DEVICE)
    blocks = spoil_free_memory()
    torch.testing.assert_close(call(x), expected, rtol=1e-3, atol=1e-3)
    assert blocks


def test_a_benchmarks_graph_keeps_what_only_its_body_holds() -> None:
    out = torch.zeros(256, device=DEVICE)

    def body() -> Callable[[int], object]:
        ones = torch.ones(256, device=DEVICE)
        return lambda index: out.copy_(ones)

    replay = module("_gpu").graph_of(body(), 1)
    blocks = spoil_free_memory()
    out.zero_()
    replay()
    assert out.tolist() == [1.0] * 256
    assert blocks


def test_the_stages_of_lerobots_pi05_live_as_long_as_their_graphs() -> None:
    pytest.importorskip("lerobot", reason="LeRobot is not installed here")
    workload = short_pi05(DEVICE)
    policy: Any = workload.model
    observed = [Observation(args, kwargs, None) for args, kwargs in workload.examples]
    call = _call(policy, observed, DEVICE)
    _, kwargs = workload.examples[0]
    short = {**kwargs, "masks": (torch.arange(200, device=DEVICE) < 30)[None]}
    expected = [call(**example) for example in (kwargs, short)]
    blocks = spoil_free_memory()
    for example, result in zip((kwargs, short), expected, strict=True):
        assert bool(result.isfinite().all())
        assert torch.equal(call(**example), result)
    with torch.no_grad():
        original = policy.sample_actions(**kwargs)
    assert distance(expected[0].double(), original.double()) < 0.02
    assert blocks


BREAKING = """
import torch
from flashrt_ros.accelerate import DeviceFaultError, Gates, accelerate, registered
from test.accelerate.models import PlantedNorm, examples, mlp

left = 1

def fault(y):
    global left
    left -= 1
    beyond = torch.full((1,), 0 if left >= 0 else 7, device=y.device)
    return y + 0 * torch.zeros(1, device=y.device)[beyond]

inputs = [x.cuda() for x in examples()]
with registered(PlantedNorm("breaks_the_gpu", fault)):
    try:
        accelerate(mlp().cuda(), inputs, gates=Gates(rounds=6, turn_s=0.001), kinds=("kernel",))
    except DeviceFaultError as error:
        print("FAULT:", error, flush=True)
"""


def test_a_candidate_that_breaks_the_gpu_is_named() -> None:
    found = subprocess.run(  # in a process of its own, as nothing runs on the device there afterwards
        [sys.executable, "-W", "ignore", "-c", BREAKING], capture_output=True, text=True, timeout=120, check=False
    )
    message = "FAULT: candidate 'breaks_the_gpu' left 'cuda:0' with a fault: CUDA error"
    assert message in found.stdout, found.stdout + found.stderr[-2000:]
