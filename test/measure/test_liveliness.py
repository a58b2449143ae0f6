"""With the random weights every part of the model changes the actions: a mistake in any of them would be seen."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from flashrt_ros.measure.pi05.observations import Observation, make_observations
from flashrt_ros.measure.pi05.ours import Ours
from test.measure.tiny import pictures, settings

SEEN = 1e-3  # relative change of the flow; float32 implementations agree to 1e-6
PARTS = (
    "layernorm.dense.weight",
    "gemma_expert.model.norm.dense.weight",
    "language_model.layers.1.input_layernorm.weight",
    "language_model.layers.0.post_attention_layernorm.weight",
    "position_embedding.weight",
    "layer_norm1.bias",
    "multi_modal_projector.linear.bias",
    "time_mlp_in.weight",
    "embed_tokens.weight",
    "language_model.layers.2.self_attn.k_proj.weight",
    "gemma_expert.model.layers.2.self_attn.q_proj.weight",
    "gemma_expert.model.layers.0.mlp.gate_proj.weight",
)


def flow(folder: Path, observation: Observation | None = None) -> tuple[np.ndarray, Observation]:
    ours = Ours.start(settings(folder, prompt_buckets=[200]), "cpu")
    seen = observation or make_observations(ours.policy, 1, pictures())[0]
    return ours.decide(seen) - seen.noise, seen


@cache
def whole(folder: Path) -> tuple[np.ndarray, Observation]:
    return flow(folder)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_is_zeroed_is_missed(folder: Path, tmp_path: Path, part: str) -> None:
    expected, observation = whole(folder)
    altered = tmp_path / "altered"
    shutil.copytree(folder, altered)
    weights = load_file(altered / "model.safetensors")
    found = [name for name in weights if part in name]
    assert found
    for name in found:
        weights[name].zero_()
    save_file(weights, altered / "model.safetensors")
    actual, _ = flow(altered, observation)
    assert np.linalg.norm(actual - expected) / np.linalg.norm(expected) > SEEN


def test_another_instruction_and_another_image_are_noticed(folder: Path) -> None:
    expected, seen = whole(folder)
    darker = {view: pixels // 2 for view, pixels in seen.images.items()}
    others = (Observation(darker, seen.tokens, seen.noise), Observation(seen.images, seen.tokens[:-1], seen.noise))
    for other in others:
        actual, _ = flow(folder, other)
        assert np.linalg.norm(actual - expected) / np.linalg.norm(expected) > SEEN
