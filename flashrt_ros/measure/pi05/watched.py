"""π0.5 in its wide precision, run stage by stage under an observer. Nothing is captured, so that it can look."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...contract import Variant
from ...engine import Arena, resolve_device
from ...ops import reference_ops
from ...ops.embed import ABSENT
from ...policies.pi05 import Pi05Policy, build
from ...policies.pi05.plan import image_buffer, variant_name
from ...policies.pi05.sites import operand_sites, site_matrices, site_names
from ...policies.pixels import PixelOrder
from ...policies.samples import Sample, SampleError
from ...precision.observe import Observer
from .observations import Observation


def wide_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` for the references in 16-bit (or whatever `dtype` says)."""
    return {**settings, "precision": "16-bit", "calibration": "", "unverified": False, "fused": False}


class Watched:
    """A policy whose products are watched.

    Attributes:
        policy: the wide policy.
        observer: what watches.
    """

    def __init__(self, settings: Mapping[str, Any], device: str) -> None:
        self.observer = Observer()
        self.policy: Pi05Policy = build(wide_settings(settings), device, self.observer.ops(reference_ops()))
        self._device = resolve_device(device)
        self._arena = Arena(self.policy.contract, self._device)

    def watch(self, observations: Sequence[Observation], advance: Callable[[int], None]) -> None:
        """Run every observation once; `advance` is told of each."""
        matrices = site_matrices(self.policy.weights)
        config = self.policy.config
        calls = {
            site: len(observations) * (config.steps if site.startswith("expert.") else 1) for site in site_names(config)
        }
        self.observer.watch(matrices, calls, operand_sites(config))
        with torch.inference_mode():
            self.policy.bodies["checkpoint"](self._arena, self.policy.contract.variants[0])
            for observation in observations:
                self._run(observation)
                advance(1)

    def _run(self, observation: Observation) -> None:
        arena, config = self._arena, self.policy.config
        variant = self._fill(observation)
        self.policy.bodies["prompt"](arena, variant)
        live = {"prefix": config.image_rows + len(observation.tokens)}  # what is behind them is padding
        for part, body in self.policy.parts.items():
            self.observer.live = live.get(part)
            body(arena, variant)

    def _fill(self, observation: Observation) -> Variant:
        arena, config = self._arena, self.policy.config
        for index, view in enumerate(config.views):
            pixels = observation.images[view]
            arena[image_buffer(view)][: pixels.size].copy_(torch.from_numpy(pixels.reshape(-1)))
            arena["image_format"][index].copy_(torch.tensor([*pixels.shape, PixelOrder.RGB], dtype=torch.int32))
        padded = np.full(config.prompt_buckets[-1], ABSENT, np.int32)
        padded[: len(observation.tokens)] = observation.tokens
        arena["tokens"].copy_(torch.from_numpy(padded))
        arena["noise"].copy_(torch.from_numpy(observation.noise))
        bucket = next(size for size in config.prompt_buckets if len(observation.tokens) <= size)
        return self.policy.contract.variant(variant_name(bucket))


def observations_of(samples: Sequence[Sample], policy: Pi05Policy, seed: int) -> list[Observation]:
    """Samples with the policy's own prompts and with noise; SampleError names the one that cannot be a prompt."""
    generator = np.random.default_rng(seed)
    return [_observation(sample, policy, generator) for sample in samples]


def _observation(sample: Sample, policy: Pi05Policy, generator: np.random.Generator) -> Observation:
    try:
        tokens = policy.processor.tokens(policy.processor.text(sample.instruction, sample.state))
    except ValueError as error:
        raise SampleError(f"{sample.where}: {error}") from None
    return Observation(
        images={view: sample.images[view] for view in policy.views},
        tokens=tokens[tokens >= 0],
        noise=generator.standard_normal((policy.config.chunk, policy.config.padded_width), np.float32),
    )
