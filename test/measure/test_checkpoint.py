"""The checkpoint that measurements are made with: a real LeRobot folder, alive in every parameter, from a seed."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from flashrt_ros.measure.errors import MeasureError
from flashrt_ros.measure.pi05 import random_weights
from flashrt_ros.measure.pi05.checkpoint import checkpoint_config, cut, default_settings
from flashrt_ros.measure.pi05.random_weights import random_tensors, write_random_weights
from flashrt_ros.policies.pi05 import build
from flashrt_ros.policies.pi05.layout import EMBEDDING, EXPERT_HEAD, TIED_EMBEDDING, expected_shapes, modulation_names
from test.measure.tiny import settings, tiny_config, write_tiny


@pytest.fixture(scope="module")
def weights(folder: Path) -> dict[str, Tensor]:
    return {name.removeprefix("model."): tensor for name, tensor in load_file(folder / "model.safetensors").items()}


def test_it_has_every_tensor_of_the_official_model_and_no_other(weights: dict[str, Tensor]) -> None:
    expected = {**expected_shapes(tiny_config()), TIED_EMBEDDING: (896, 64), EXPERT_HEAD: (896, 48)}
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == expected


def test_our_policy_loads_it(folder: Path) -> None:
    policy = build(settings(folder))
    assert policy.views == ("front", "left_wrist", "right_wrist")
    assert policy.chunk == 6
    assert len(policy.action_names) == len(policy.state_names) == 8


def test_the_language_head_is_the_embedding_and_the_unused_head_a_hole(
    folder: Path, weights: dict[str, Tensor]
) -> None:
    assert torch.equal(weights[TIED_EMBEDDING], weights[EMBEDDING])
    assert weights[EMBEDDING].std() == pytest.approx(1 / 8, rel=0.05)
    assert not weights[EXPERT_HEAD].any()


def test_nothing_is_zero_that_the_official_initialisation_leaves_zero(weights: dict[str, Tensor]) -> None:
    for name in modulation_names(tiny_config()):
        assert weights[f"{name}.weight"].std() == pytest.approx(0.02, rel=0.1)
    norms = [tensor for name, tensor in weights.items() if "layernorm.weight" in name and "vision" not in name]
    assert torch.cat(norms).std() == pytest.approx(0.1, rel=0.2)
    assert all(tensor.abs().max() > 0 for name, tensor in weights.items() if name != EXPERT_HEAD)


def test_projections_that_add_to_a_residual_are_scaled_by_the_depth(weights: dict[str, Tensor]) -> None:
    language = "paligemma_with_expert.paligemma.model.language_model.layers.0"
    assert weights[f"{language}.mlp.up_proj.weight"].std() == pytest.approx(1 / math.sqrt(64), rel=0.05)
    assert weights[f"{language}.mlp.down_proj.weight"].std() == pytest.approx(
        1 / math.sqrt(128) / math.sqrt(2 * 3), rel=0.05
    )
    assert weights["action_out_proj.weight"].std() == pytest.approx(1 / math.sqrt(48), rel=0.1)


def test_a_seed_decides_every_value_and_the_number_of_threads_none(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    again, other = write_tiny(tmp_path / "again"), write_tiny(tmp_path / "other", seed=1)
    file = "model.safetensors"
    assert (again / file).read_bytes() == (folder / file).read_bytes()
    assert (other / file).read_bytes() != (folder / file).read_bytes()


def test_what_is_written_is_what_is_drawn_also_over_many_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_weights, "_BLOCK", 1000)
    config = tiny_config(dtype="bfloat16")
    size = write_random_weights(tmp_path / "w", config, 3, torch.bfloat16)
    assert size == (tmp_path / "w").stat().st_size
    written = load_file(tmp_path / "w")
    for name, tensor in random_tensors(config, 3):
        assert torch.equal(written[f"model.{name}"], tensor.bfloat16()), name


def test_the_header_is_aligned_and_marked_as_torch(folder: Path) -> None:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    with open(folder / "model.safetensors", "rb") as raw:
        assert int.from_bytes(raw.read(8), "little") % 8 == 0


def test_a_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        write_random_weights(tmp_path / "w", tiny_config(), 0, torch.float32)


def test_a_cut_says_other_things_about_the_same_weights(folder: Path, tmp_path: Path) -> None:
    target = cut(folder, tmp_path / "cut", views=2, chunk=4)
    policy = build(settings(target))
    assert policy.views == ("front", "left_wrist")
    assert policy.chunk == 4
    assert (target / "model.safetensors").resolve() == (folder / "model.safetensors").resolve()
    assert json.loads((folder / "config.json").read_text())["chunk_size"] == 6


def test_a_cut_cannot_add_views(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(MeasureError, match="4 views were asked for, the checkpoint has 3"):
        cut(folder, tmp_path / "cut", views=4)


def test_names_are_made_up_only_where_the_folder_has_none(folder: Path, tmp_path: Path) -> None:
    assert default_settings(folder)["state_names"][0] == "panda_joint1"
    assert "action_names" not in default_settings(folder)
    target = cut(folder, tmp_path / "cut")
    config = json.loads((target / "config.json").read_text())
    config["action_feature_names"] = None
    config["input_features"]["observation.state"]["shape"] = [3]
    (target / "config.json").write_text(json.dumps(config))
    assert default_settings(target)["state_names"] == ["state_0", "state_1", "state_2"]
    assert default_settings(target)["action_names"] == [f"action_{i}" for i in range(8)]


def test_every_preset_has_a_checkpoint_configuration() -> None:
    assert checkpoint_config("pi05").dtype == "bfloat16"
    assert checkpoint_config("pi05_tiny", views=("one",)).views == ("one",)
    assert np.prod(expected_shapes(checkpoint_config("pi05"))[EMBEDDING]) == 257152 * 2048
