"""Checkpoints as openpi's PyTorch conversion writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save_file

from flashrt_ros.policies import CheckpointError, SettingsError
from flashrt_ros.policies.pi05 import Pi05Policy, build
from flashrt_ros.policies.pi05.layout import EMBEDDING, TIED_EMBEDDING
from flashrt_ros.policies.pi05.presets import SEEDED_PRESETS
from flashrt_ros.policies.pi05.seeded import seeded_tensors
from flashrt_ros.policies.pi05.settings import resolve
from test.policies.pi05.tiny import SMALL, STATE, small_policy

JOINTS = resolve(SMALL).config.action_names
DECIDED: dict[str, Any] = {"state_in_prompt": True, "relative_actions": False, "action_names": list(JOINTS)}
VIEWS = ["base_0_rgb", "left_wrist_0_rgb"]


def statistics(offset: float = 0.0, width: int = 32) -> dict[str, Any]:
    vector = {"q01": [-3.0 + offset] * width, "q99": [3.0] * width, "mean": [0.0] * width, "std": [1.0] * width}
    return {"norm_stats": {"state": vector, "actions": vector}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors = seeded_tensors(resolve(SMALL).config, SEEDED_PRESETS["pi05_tiny"].seed)
    tensors[TIED_EMBEDDING] = tensors.pop(EMBEDDING)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"action_dim": 32, "action_horizon": 16, "precision": "bfloat16"}))
    add_asset(tmp_path, "robot", statistics())
    return tmp_path


def add_asset(folder: Path, name: str, content: object) -> Path:
    path = folder / "assets" / name / "norm_stats.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def load(folder: Path, **changes: Any) -> Pi05Policy:
    return build({**SMALL, "checkpoint": str(folder), "views": VIEWS, **DECIDED, **changes})


def test_weights_and_sizes_are_read(folder: Path) -> None:
    policy = load(folder)
    assert policy.chunk == 16
    assert policy.contract.identity.weights == small_policy().contract.identity.weights


def test_quantiles_have_openpis_margin(folder: Path) -> None:
    policy = load(folder)
    rows = np.tile(np.linspace(-1, 1, 16, dtype=np.float32)[:, None], (1, 32))
    expected = (rows[:, : len(JOINTS)] + 1) / 2 * (6.0 + 1e-6) - 3.0
    np.testing.assert_allclose(policy.processor.actions(rows, None), expected, atol=1e-6)


def test_the_state_text_uses_as_many_quantiles_as_there_are_states(folder: Path) -> None:
    text = load(folder).processor.text("go", STATE)
    expected = np.digitize((STATE + 3) / (6 + 1e-6) * 2 - 1, np.linspace(-1, 1, 257)[:-1]) - 1
    assert text == f"Task: go, State: {' '.join(map(str, expected))};\nAction: "


def test_without_a_state_the_prompt_is_the_task_and_a_newline(folder: Path) -> None:
    assert load(folder, state_in_prompt=False).processor.text(" pick_up\nit ", None) == "pick up it\n"


@pytest.mark.parametrize("name", list(DECIDED))
def test_what_the_folder_does_not_record_must_be_set(folder: Path, name: str) -> None:
    known = {key: value for key, value in DECIDED.items() if key != name}
    with pytest.raises(SettingsError, match=f"does not record '{name}'; set it as in training"):
        build({**SMALL, "checkpoint": str(folder), "views": VIEWS, **known})


def test_one_of_several_statistics_is_chosen_by_name(folder: Path) -> None:
    add_asset(folder, "other/arm", statistics(offset=1.0))
    with pytest.raises(CheckpointError, match=r"has several statistics; set 'asset' to one of: other/arm, robot"):
        load(folder)
    with pytest.raises(CheckpointError, match=r"has no 'third'; set 'asset' to one of: other/arm, robot"):
        load(folder, asset="third")
    one, other = (load(folder, asset=name).processor.digest() for name in ("robot", "other/arm"))
    assert one != other


def test_missing_statistics_are_refused(folder: Path) -> None:
    (folder / "assets" / "robot" / "norm_stats.json").unlink()
    with pytest.raises(CheckpointError, match=r"assets' holds no norm_stats.json"):
        load(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "has no object 'norm_stats'"),
        ({"norm_stats": {"state": {}, "actions": {}}}, r"'state.q01' has shape \[0\], expected at least 8"),
        (statistics(width=4), r"'state.q01' has shape \[4\], expected at least 8"),
        (statistics(offset=float("nan")), r"'state.q01' has shape \[32\], expected at least 8 finite values"),
    ],
)
def test_bad_statistics_are_named(folder: Path, content: object, message: str) -> None:
    add_asset(folder, "robot", content)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_a_folder_without_a_config_is_openpis_if_it_has_assets(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert load(folder).chunk == 16
