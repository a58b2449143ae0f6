"""Hidden values of vision in whole lines: fused stages give what they give without, and nobody else sees it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flashrt_ros.policies.pi05 as pi05
from flashrt_ros.engine import Arena
from flashrt_ros.ops import reference_ops
from flashrt_ros.ops.cuda import gemm
from flashrt_ros.ops.cuda import rows as kernels
from flashrt_ros.ops.cuda.errors import KernelError
from flashrt_ros.ops.cuda.gemm import CODES, Behind
from flashrt_ros.ops.cuda.rows import Quantiser
from flashrt_ros.policies.pi05 import Pi05Policy, cuda_plan, cuda_stages
from flashrt_ros.policies.pi05 import policy as policy_module
from flashrt_ros.policies.pi05.config import Pi05Config
from flashrt_ros.policies.pi05.cuda_attention import IMAGE
from flashrt_ros.policies.pi05.cuda_products import as_codes
from flashrt_ros.policies.pi05.cuda_tiers import WIDE_VISION, TierStages
from flashrt_ros.policies.pi05.plan import image_buffer
from flashrt_ros.policies.pi05.stages import Pi05Stages
from flashrt_ros.policies.pi05.tiers import tier_key
from flashrt_ros.precision import e4m3
from flashrt_ros.precision.calibration import Calibration, SiteScale, save_calibration
from flashrt_ros.precision.nvfp4 import Nvfp4
from flashrt_ros.precision.ops import tier_ops
from flashrt_ros.precision.packed import PackedWeight
from flashrt_ros.precision.tier import load_tier
from test.policies.pi05.tiny import small_policy

WIDTHS: dict[str, Any] = {"dtype": "bfloat16", "vision_width": 256, "vision_layers": 2}
HIDDEN, PADDED = 448, 512
RULES = """
tier: mine
fidelity: {cosine_global: 0.99, cosine_worst: 0.9}
rules:
  - {sites: "vision.up.*", weight: WEIGHT, activation: e4m3, why: a test}
  - {sites: "vision.down.*", weight: WEIGHT, activation: e4m3, why: a test}
  - {sites: "*", weight: 16-bit, activation: 16-bit, why: a test}
"""


@pytest.fixture
def padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights as they are placed on a GPU."""
    for module in (pi05, policy_module):
        monkeypatch.setattr(module, "pads", lambda *_: True)


def narrow(folder: Path, weight: str) -> dict[str, Any]:
    """Settings of a tier of which the hidden values of vision are codes."""
    tier, path = folder / "mine.yaml", folder / "c.safetensors"
    tier.write_text(RULES.replace("WEIGHT", weight))
    wide = small_policy(**WIDTHS)
    key = tier_key(wide.config, load_tier(str(tier)), wide.contract.identity)
    save_calibration(path, Calibration(key, {item.name: SiteScale(0.02, None) for item in key.formats}))
    return {**WIDTHS, "precision": str(tier), "calibration": str(path), "unverified": True}


# -- the fused stages, with what their kernels compute -----------------------------------------------------------------


def product(x: Tensor, weight: Tensor, *, out: Tensor, behind: Behind, **_: Any) -> None:
    result = x.double() @ weight.double().t()
    result = result if behind.factor is None else result * behind.factor
    result = result if behind.bias is None else result + behind.bias
    result = F.gelu(result, approximate="tanh") if behind.gelu else result
    if behind.out_scale is not None:
        out.copy_(e4m3.quantise(result.bfloat16(), behind.out_scale).view(CODES))
        return
    out.zero_()
    (out[0, : len(x)] if out.ndim == 3 else out).copy_(result)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, *, eps: float, out: Tensor, branch: Tensor | None = None,
    quantiser: Quantiser | None = None, overlap: bool = False,
) -> None:  # fmt: skip
    if branch is not None:
        x += branch.sum(0)[: len(x)] if branch.ndim == 3 else branch
    result = F.layer_norm(x, (x.shape[1],), weight, bias, eps)
    out.copy_(result if quantiser is None else e4m3.quantise(result, quantiser.scale).view(CODES))


def pixels_to_patches(pixels: Tensor, pixel_format: Tensor, *, patch: int, out: Tensor) -> None:
    narrower = torch.empty(len(out), 3 * patch * patch, dtype=out.dtype)
    reference_ops().pixels_to_patches(pixels, pixel_format, patch=patch, out=narrower)
    out.copy_(F.pad(narrower, (0, out.shape[1] - narrower.shape[1])))


def quantise(x: Tensor, quantiser: Quantiser, *, out: Tensor, overlap: bool = False) -> None:
    out.copy_(e4m3.quantise(x, quantiser.scale).view(CODES))


def decode_nvfp4(codes: Tensor, scales: Tensor, *, out: Tensor) -> None:
    out.copy_(Nvfp4(codes, scales, torch.ones(1), out.shape[1]).decode())


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise KernelError("no")

    monkeypatch.setattr(cuda_stages, "pack_expert", refuse)
    monkeypatch.setattr(gemm, "unsuited", lambda _: "")
    monkeypatch.setattr(gemm, "product", product)
    monkeypatch.setattr(gemm, "parts_rows", lambda rows, *_: rows)
    for made in (layer_norm, pixels_to_patches, quantise, decode_nvfp4):
        monkeypatch.setattr(kernels, made.__name__, made)


def image_rows(policy: Pi05Policy, stages: Pi05Stages) -> Tensor:
    arena, variant = Arena(policy.contract, torch.device("cpu")), policy.contract.variants[0]
    for index, view in enumerate(policy.views):
        pixels = arena[image_buffer(view)]
        pixels.copy_(torch.randint(0, 256, pixels.shape, generator=torch.Generator().manual_seed(index)))
        arena["image_format"][index].copy_(torch.tensor([28, 28, 3, 0]))
    with torch.inference_mode():
        stages.vision(arena, variant)
    return arena["prefix_residual"][: policy.config.image_rows].double()


@pytest.mark.parametrize("weight", ["16-bit", "e4m3", "e4m3_tensor", "nvfp4"])
@pytest.mark.usefixtures("padded", "on_a_cpu")
def test_the_fused_stages_multiply_whole_lines_and_give_what_they_give_without(
    weight: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = small_policy(**(WIDTHS if weight == "16-bit" else narrow(tmp_path, weight)))
    stages = TierStages(policy.config, policy.weights, reference_ops(), fused_gate_up=False)
    stages.attentions.choose(IMAGE, "there is no GPU")
    stages._hidden.fill_(float("nan"))
    expected = image_rows(policy, Pi05Stages(policy.config, policy.weights, tier_ops(reference_ops())))
    got = image_rows(policy, stages)
    assert float((got - expected).norm() / expected.norm()) < 0.05
    assert stages._hidden.shape == (policy.config.image_rows, PADDED)
    assert stages._patches.shape[1] == stages._patch.shape[1] == 640
    assert stages._patch.data_ptr() == policy.weights.vision.patch.data_ptr()
    for layer, stored in zip(stages._vision_layers, policy.weights.vision.layers, strict=True):
        assert (tuple(layer.up.weight.shape), tuple(layer.down.weight.shape)) == ((PADDED, 256), (256, PADDED))
        for wider, weights in ((layer.up.weight, stored.up.weight), (layer.down.weight, stored.down.weight)):
            assert memory_of(wider) == memory_of(weights)  # no copy
    written = stages._hidden if weight in ("16-bit", "nvfp4") else as_codes(stages._hidden)
    assert not written[:, HIDDEN:].float().any()
    with monkeypatch.context() as without:
        without.setattr(cuda_stages, "_padded_layer", lambda layer: layer)
        without.setattr(cuda_stages, "padded_size", lambda size: size if size == HIDDEN else 640)
        plain = TierStages(policy.config, policy.weights, reference_ops(), fused_gate_up=False)
    plain.attentions.choose(IMAGE, "there is no GPU")
    assert plain._hidden.shape[1] == HIDDEN
    assert float((image_rows(policy, plain) - got).norm() / got.norm()) < 1e-3


def memory_of(weight: Tensor) -> int:
    return (weight.codes if isinstance(weight, PackedWeight) else weight).data_ptr()


# -- everyone else -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", ["16-bit", "e4m3"])
def test_only_memory_differs(weight: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = WIDTHS if weight == "16-bit" else narrow(tmp_path, weight)
    plain = small_policy(**settings)
    for module in (pi05, policy_module):
        monkeypatch.setattr(module, "pads", lambda *_: True)
    roomy = small_policy(**settings)
    assert roomy.contract.fingerprint == plain.contract.fingerprint
    for before, after in zip(plain.weights.vision.layers, roomy.weights.vision.layers, strict=True):
        assert after.down.weight.shape == before.down.weight.shape == (256, HIDDEN)
        rows = [value_of(layer.down.weight) for layer in (before, after)]
        assert torch.equal(*rows)
        assert [matrix.stride(0) for matrix in rows] == [HIDDEN, PADDED]
    assert torch.equal(roomy.weights.vision.patch, plain.weights.vision.patch)


@pytest.mark.usefixtures("padded", "on_a_cpu")
def test_vision_runs_without_the_own_products_of_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise KernelError("does not compile")

    policy = small_policy(**WIDTHS)
    stages = TierStages(policy.config, policy.weights, reference_ops(), fused_gate_up=False)
    stages.attentions.choose(IMAGE, "there is no GPU")
    assert stages.optional_of_vision() == (WIDE_VISION,)
    assert WIDE_VISION not in [report.op for report in stages.step_reports()]
    expected = image_rows(policy, stages)
    monkeypatch.setattr(gemm, "product", broken)
    with pytest.raises(KernelError, match="does not compile"):
        image_rows(policy, stages)
    stages.leave_out(WIDE_VISION, "does not compile")
    assert float((image_rows(policy, stages) - expected).norm() / expected.norm()) < 0.02
    assert "vision.wide: cublaslt (does not compile)" in [str(report) for report in stages.step_reports()]
    stages.leave_out(WIDE_VISION, "")
    with pytest.raises(KernelError, match="does not compile"):
        image_rows(policy, stages)


def value_of(weight: Tensor) -> Tensor:
    return weight.codes if isinstance(weight, PackedWeight) else weight


def test_a_gpu_with_fused_stages_gets_room(monkeypatch: pytest.MonkeyPatch) -> None:
    config: Pi05Config = small_policy().config
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(cuda_plan, "unsuited", lambda *_: "")
    found = [
        policy_module.pads(dataclasses.replace(config, fused=fused), torch.device(device))
        for device in ("cuda", "cpu")
        for fused in (True, False)
    ]
    assert found == [True, False, False, False]


def test_a_gpu_whose_references_multiply_needs_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    config: Pi05Config = small_policy().config
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 9))
    assert not policy_module.pads(dataclasses.replace(config, fused=True), torch.device("cuda"))
