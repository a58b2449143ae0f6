"""Formats and tiers on a GPU: the same bits as on the CPU, and a tier that is captured and replayed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from flashrt_ros.measure.pi05.calibrate import calibrate_tier
from flashrt_ros.measure.pi05.observations import make_observations
from flashrt_ros.measure.pi05.ours import Ours
from flashrt_ros.measure.pi05.watched import Watched
from flashrt_ros.policies import SettingsError
from flashrt_ros.precision import e2m1, e4m3, nvfp4
from flashrt_ros.precision.calibration import save_calibration
from flashrt_ros.precision.tier import load_tier
from test.measure.tiny import pictures, settings, write_tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def values(seed: int) -> Tensor:
    """Ordinary values, ties, extremes and zeros."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(seed)) * torch.logspace(-6, 6, 64)[:, None]
    x[0, :8] = torch.tensor([0.0, -0.0, 0.25, 0.75, 1.25, 2.5, 5.0, 1e30])
    x[1] = 0
    return x


@pytest.mark.parametrize("seed", range(3))
def test_formats_give_the_bits_of_the_cpu(seed: int) -> None:
    x = values(seed)
    assert torch.equal(e4m3.encode(x.cuda()).cpu(), e4m3.encode(x))
    assert torch.equal(e2m1.encode(x.cuda()).cpu(), e2m1.encode(x))
    scale = nvfp4.tensor_scale_for(x.abs().max())
    there, here = nvfp4.quantise(x.cuda(), scale.cuda()), nvfp4.quantise(x, scale)
    assert torch.equal(there.scales.cpu(), here.scales)
    assert torch.equal(there.packed.cpu(), here.packed)
    assert torch.equal(there.decode().cpu(), here.decode())
    for on_gpu, on_cpu in zip(
        e4m3.quantise_weight(x.cuda(), by_channel=True), e4m3.quantise_weight(x, by_channel=True), strict=True
    ):
        assert torch.equal(on_gpu.cpu(), on_cpu)


def test_a_weight_loses_as_little_as_on_the_cpu() -> None:
    # Not the same bits: which of two block scales is better is a sum, and sums depend on their order.
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(4))
    there, here = nvfp4.quantise_weight(x.cuda()).decode().cpu(), nvfp4.quantise_weight(x).decode()
    assert float((there - x).norm()) == pytest.approx(float((here - x).norm()), rel=1e-5)


@pytest.mark.parametrize("tier", ["8-bit", "4-bit", "4-bit-blackwell"])
def test_a_calibration_of_the_cpu_serves_the_gpu_and_both_decide_alike(tmp_path: Path, tier: str) -> None:
    folder, path = write_tiny(tmp_path / "checkpoint"), tmp_path / "c.safetensors"
    watched = Watched(settings(folder), "cpu")
    observations = make_observations(watched.policy, 3, pictures(), 0)
    save_calibration(path, calibrate_tier(watched, load_tier(tier), observations, source="a test"))
    tiered = settings(folder, precision=tier, calibration=str(path), unverified=True, fused=False)
    here, there = Ours.start(tiered, "cpu"), Ours.start(tiered, "cuda")
    for observation in observations:
        expected, got = here.decide(observation), there.decide(observation)
        assert float(np.linalg.norm(got - expected) / np.linalg.norm(expected)) < 0.02
        assert np.array_equal(got, there.decide(observation))


def test_a_tier_beyond_this_gpu_names_site_and_reason(tmp_path: Path) -> None:
    if torch.cuda.get_device_capability() >= (10, 0):
        pytest.skip("this GPU multiplies NVFP4")
    folder, path = write_tiny(tmp_path / "checkpoint"), tmp_path / "c.safetensors"
    watched = Watched(settings(folder), "cuda")
    observations = make_observations(watched.policy, 2, pictures(), 0)
    save_calibration(path, calibrate_tier(watched, load_tier("4-bit-blackwell"), observations, source="a test"))
    with pytest.raises(SettingsError, match=r"site 'prefix\.qkv\.0': nvfp4 activations need compute capability 10\.0"):
        Ours.start(
            settings(folder, precision="4-bit-blackwell", calibration=str(path), unverified=True, fused=True), "cuda"
        )
