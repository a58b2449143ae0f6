"""A π0.5 of two layers a stack at its true widths, for tests of the fused stages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flashrt_ros.contract import Contract, Identity, Variant
from flashrt_ros.engine import Arena
from flashrt_ros.ops import reference_ops
from flashrt_ros.policies.pi05.config import Pi05Config
from flashrt_ros.policies.pi05.plan import build_contract, image_buffer
from flashrt_ros.policies.pi05.seeded import seeded_tensors
from flashrt_ros.policies.pi05.sites import foldable_sites, operand_sites, site_matrices, site_names
from flashrt_ros.policies.pi05.source import MemorySource
from flashrt_ros.policies.pi05.stages import Pi05Stages
from flashrt_ros.policies.pi05.tiers import ChosenTier, pack_weights, tier_key
from flashrt_ros.policies.pi05.weights import Pi05Weights, load_weights
from flashrt_ros.precision.calibrating import calibrate, choose_multipliers
from flashrt_ros.precision.observe import Observer
from flashrt_ros.precision.ops import tier_ops
from flashrt_ros.precision.tier import Tier

NEEDS_KERNELS = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="needs a GPU of compute capability 9.0",
    ),
]
DEVICE = torch.device("cuda", 0)
NAMES = tuple(f"joint_{i}" for i in range(7))
CONFIG = Pi05Config(
    views=("left", "right"),
    state_names=NAMES,
    action_names=NAMES,
    chunk=10,
    prompt_buckets=(48, 200),
    max_pixels=640 * 480,
    vision_layers=2,
    layers=2,
    vocabulary=1000,
)
_IDENTITY = Identity(
    policy="pi05", weights="seeded", precision="bfloat16", kernels="", views=CONFIG.views, chunk=CONFIG.chunk,
    horizon=CONFIG.chunk, embodiment="test", normalisation="none", architecture="test",
)  # fmt: skip


@dataclass(frozen=True)
class Model:
    """Configuration, plan and weights that belong together."""

    config: Pi05Config
    contract: Contract
    weights: Pi05Weights

    def arena(self, seed: int = 0, tokens: int = 190) -> tuple[Arena, Variant]:
        """Filled windows, and the shape key for that many tokens. Scratch is poisoned."""
        arena, config = Arena(self.contract, DEVICE), self.config
        for buffer in self.contract.buffers:
            if arena[buffer.name].is_floating_point():
                arena[buffer.name].fill_(float("nan"))
        generator = torch.Generator().manual_seed(seed)
        for index, view in enumerate(config.views):
            window = arena[image_buffer(view)]
            window.copy_(torch.randint(0, 256, window.shape, generator=generator, dtype=torch.uint8))
            arena["image_format"][index].copy_(torch.tensor([480 - index, 640, 3, index], dtype=torch.int32))
        arena["tokens"].fill_(-1)
        arena["tokens"][:tokens].copy_(torch.randint(0, 1000, (tokens,), generator=generator, dtype=torch.int32))
        arena["noise"].copy_(torch.randn(arena["noise"].shape, generator=generator))
        return arena, next(v for v in self.contract.variants if v.dims["prompt"] >= tokens)


@lru_cache(maxsize=1)
def _tensors() -> dict[str, Tensor]:
    """Values that bfloat16 holds exactly, so that both precisions start from equal weights."""
    return {name: tensor.bfloat16().float() for name, tensor in seeded_tensors(CONFIG, 7).items()}


@lru_cache(maxsize=8)
def model(dtype: str = "bfloat16", chunk: int = 10) -> Model:
    """The model for one precision and chunk length; weights do not depend on either."""
    config = replace(CONFIG, dtype=dtype, chunk=chunk)
    weights = load_weights(MemorySource(_tensors(), config, "test"), config, DEVICE, padded=True)
    contract = build_contract(config, replace(_IDENTITY, precision=dtype, chunk=chunk, horizon=chunk))
    return Model(config, contract, weights)


def reference(made: Model) -> Pi05Stages:
    """The stages in PyTorch."""
    return Pi05Stages(made.config, made.weights, tier_ops(reference_ops()))


def in_tier(tier: Tier, seeds: tuple[int, ...] = (11, 12)) -> Model:
    """The model in `tier`, calibrated on the windows of these seeds."""
    made, observer = model(), Observer()
    watched = Pi05Stages(made.config, made.weights, observer.ops(reference_ops()))
    matrices = site_matrices(made.weights)
    names = site_names(made.config)
    calls = {site: len(seeds) * (made.config.steps if site.startswith("expert.") else 1) for site in names}
    observer.watch(matrices, calls, operand_sites(made.config))
    key = tier_key(made.config, tier, made.contract.identity)
    for seed in seeds:
        decide(watched, made, seed)
    seen = {site: matrix for site, matrix in matrices.items() if site in observer.ranges}
    with torch.inference_mode():
        choices = choose_multipliers(observer, seen, key.formats, foldable_sites(made.config))
    observer.multipliers = {site: c.multiplier for site, c in choices.items() if c.multiplier is not None}
    for seed in seeds:
        decide(watched, made, seed)
    chosen = ChosenTier(tier, key.formats, Path(), calibrate(observer, choices, key, protocol={}))
    weights = pack_weights(made.weights, chosen, padded=True)
    return Model(made.config, replace(made.contract, formats=key.formats), weights)


def decide(stages: Pi05Stages, made: Model, seed: int = 0, tokens: int = 190) -> dict[str, Tensor]:
    """Run every stage; what each part leaves, live rows only, in float64."""
    arena, variant = made.arena(seed, tokens)
    with torch.inference_mode():
        for body in (stages.checkpoint, stages.prompt, stages.vision):
            body(arena, variant)
        left = {"vision": arena["prefix_residual"][: made.config.image_rows].double()}
        stages.prefix(arena, variant)
        stages.action(arena, variant)
    live = made.config.image_rows + tokens
    return {
        **left,
        "prefix": arena["key_value"][:, :, :live].double(),
        "expert": arena["actions"].double() - arena["noise"].double(),
    }


def distance(a: Tensor, b: Tensor) -> float:
    """Relative to the second."""
    return float((a - b).norm() / b.norm())
