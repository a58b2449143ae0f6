"""The plain PyTorch model computes what ours does: otherwise its time would mean nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flashrt_ros.measure.parity import cosine
from flashrt_ros.measure.pi05.observations import Observation, make_observations, random_tokens
from flashrt_ros.measure.pi05.ours import Ours
from flashrt_ros.measure.pi05.plain import Plain
from flashrt_ros.policies.pi05.source import FileSource
from flashrt_ros.policies.pi05.weights import load_weights
from test.measure.tiny import pictures, settings

CPU = torch.device("cpu")


def both(folder: Path, **changes: Any) -> tuple[np.ndarray, np.ndarray]:
    """Flows of ours and of the plain model on a prompt that fills its bucket."""
    ours = Ours.start(settings(folder, prompt_buckets=[50], **changes), "cpu")
    config = ours.policy.config
    seen = make_observations(ours.policy, 1, pictures())[0]
    tokens = random_tokens(config, 50, np.random.default_rng(0))
    observation = Observation(seen.images, tokens, seen.noise)
    weights = load_weights(FileSource(folder / "model.safetensors", config), config, CPU)
    plain = Plain(config, weights)
    with torch.inference_mode():
        theirs = plain(plain.inputs(observation, CPU)).numpy()
    return ours.decide(observation) - observation.noise, theirs - observation.noise


@pytest.mark.parametrize("views", [["front"], ["front", "left_wrist", "right_wrist"]], ids=["one view", "three views"])
@pytest.mark.parametrize("steps", [1, 10])
def test_it_agrees_in_float32(folder: Path, views: list[str], steps: int) -> None:
    own, plain = both(folder, views=views, steps=steps)
    assert np.linalg.norm(own - plain) / np.linalg.norm(own) < 1e-5


def test_it_agrees_in_bfloat16_as_far_as_rounding_allows(folder: Path) -> None:
    own, plain = both(folder, dtype="bfloat16")
    assert cosine(own, plain) > 0.999
