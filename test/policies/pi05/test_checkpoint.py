"""Checkpoints in LeRobot's format: written, read back, and refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flashrt_ros.policies import CheckpointError, PolicyError, PolicyRunner, SettingsError
from flashrt_ros.policies.pi05 import Pi05Config, Pi05Policy, build
from flashrt_ros.policies.pi05.layout import EMBEDDING, expected_shapes
from flashrt_ros.policies.pi05.lerobot_writer import write_checkpoint
from flashrt_ros.policies.pi05.memory import needed_bytes
from flashrt_ros.policies.pi05.presets import SEEDED_PRESETS
from flashrt_ros.policies.pi05.seeded import seeded_normalisers, seeded_tensors
from flashrt_ros.policies.pi05.settings import resolve
from flashrt_ros.policies.pi05.source import FileSource
from flashrt_ros.policies.pi05.weights import load_weights
from test.policies.pi05.tiny import INSTRUCTION, SMALL, look, small_policy

SIZES = {name: SMALL[name] for name in ("preset", "vision_layers", "layers", "max_pixels")}
ACTIONS = resolve(SMALL).config.action_names
WEIGHTS = "model.safetensors"


def quantiles(normaliser: Any) -> dict[str, np.ndarray]:
    return {"q01": normaliser.low, "q99": normaliser.low + normaliser.span}


def write(folder: Path, config: Pi05Config, dtype: torch.dtype = torch.float32) -> Path:
    normalisers = seeded_normalisers(config)
    tensors = seeded_tensors(config, SEEDED_PRESETS["pi05_tiny"].seed, dtype)
    write_checkpoint(folder, config, tensors, quantiles(normalisers.state), quantiles(normalisers.action))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "checkpoint", resolve(SMALL).config)


def load(folder: Path, **changes: Any) -> Pi05Policy:
    return build({**SIZES, "checkpoint": str(folder), **changes})


def chunk(policy: Pi05Policy) -> np.ndarray:
    runner = PolicyRunner.start(policy, seed=3)
    look(runner)
    runner.set_instruction(INSTRUCTION)
    return runner.decide().actions


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS)


def test_a_written_checkpoint_gives_the_bits_of_its_preset(folder: Path) -> None:
    loaded, preset = load(folder), small_policy()
    assert loaded.config.steps == 3  # the checkpoint's suggestion
    assert np.array_equal(chunk(loaded), chunk(preset))
    assert loaded.checkpoint == str(folder)
    assert preset.checkpoint == "preset:pi05_tiny"


def test_equal_weights_have_an_equal_identity_wherever_they_come_from(folder: Path) -> None:
    assert load(folder).contract.identity == small_policy().contract.identity


def test_other_weights_have_another_fingerprint(folder: Path) -> None:
    before = load(folder).contract
    edit_weights(folder, lambda weights: weights["model.action_out_proj.bias"].add_(1))
    assert before.differences(load(folder).contract) == ("weights",)


def test_names_may_lack_the_leading_model(folder: Path) -> None:
    expected = chunk(load(folder))
    stripped = {name.removeprefix("model."): value for name, value in load_file(folder / WEIGHTS).items()}
    save_file(stripped, folder / WEIGHTS)
    assert np.array_equal(chunk(load(folder)), expected)


def test_the_embedding_may_be_stored_under_the_name_of_the_tied_head(folder: Path) -> None:
    expected = chunk(load(folder))
    edit_weights(
        folder, lambda w: w.pop("model.paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight")
    )
    assert np.array_equal(chunk(load(folder)), expected)


def test_sixteen_bit_weights_are_widened(folder: Path, tmp_path: Path) -> None:
    small = load(write(tmp_path / "sixteen", resolve(SMALL).config, torch.bfloat16))
    assert np.abs(chunk(small) - chunk(load(folder))).max() < 0.05


NAME = "model.paligemma_with_expert.gemma_expert.model.layers.1.mlp.up_proj.weight"
BARE = NAME.removeprefix("model.")


def test_a_missing_tensor_is_named(folder: Path) -> None:
    edit_weights(folder, lambda weights: weights.pop(NAME))
    with pytest.raises(CheckpointError, match=rf"does not fit preset 'pi05_tiny': 1 missing \({BARE}\)"):
        load(folder)


def test_a_surplus_tensor_is_named(folder: Path) -> None:
    edit_weights(folder, lambda weights: weights.update({"model.state_proj.weight": torch.zeros(2)}))
    with pytest.raises(CheckpointError, match=r"1 surplus \(state_proj.weight\)"):
        load(folder)


def test_a_misshapen_tensor_is_named_with_both_shapes(folder: Path) -> None:
    edit_weights(folder, lambda weights: weights.update({NAME: torch.zeros(2, 3)}))
    with pytest.raises(CheckpointError, match=rf"1 misshapen \({BARE} is \[2, 3\], expected \[384, 128\]\)"):
        load(folder)


def test_all_three_are_named_together_and_long_lists_are_cut(folder: Path) -> None:
    def change(weights: dict[str, Tensor]) -> None:
        for name in [name for name in weights if "vision_tower" in name]:
            weights[f"{name}.old"] = weights.pop(name)
        weights["model.action_in_proj.bias"] = torch.zeros(1)

    edit_weights(folder, change)
    with pytest.raises(
        CheckpointError, match=r"21 missing .* and 16 more\); 21 surplus .*; 1 misshapen \(action_in_proj"
    ):
        load(folder)


def test_a_tensor_of_integers_is_refused(folder: Path) -> None:
    edit_weights(folder, lambda weights: weights.update({NAME: weights[NAME].int()}))
    with pytest.raises(CheckpointError, match=f"tensor '{NAME}' is I32, expected one of"):
        load(folder)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"\xff" * 64])
def test_a_corrupt_weights_file_is_refused(folder: Path, content: bytes) -> None:
    (folder / WEIGHTS).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"cannot read weights '.*model.safetensors'"):
        load(folder)


def test_a_truncated_weights_file_is_refused(folder: Path) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match="cannot read weights"):
        load(folder)
    (folder / WEIGHTS).write_bytes(whole)
    load(folder)


def test_the_checkpoint_must_be_a_folder_with_weights(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint '.*/nowhere' does not exist"):
        load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="is a file, give the folder around it"):
        load(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match="has no model.safetensors"):
        load(folder)


def test_another_policys_checkpoint_is_refused(folder: Path) -> None:
    edit_json(folder / "config.json", lambda config: config.update(type="smolvla"))
    with pytest.raises(CheckpointError, match="describes a 'smolvla' policy, expected 'pi05'"):
        load(folder)


@pytest.mark.parametrize("name", ["config.json", "policy_preprocessor.json"])
@pytest.mark.parametrize("content", ["{", "[1]", "\x00"])
def test_a_malformed_json_file_is_named(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)
    with pytest.raises(CheckpointError, match=rf"'.*{name}' (is not valid JSON|holds a list)"):
        load(folder)


@pytest.mark.parametrize("name", ["config.json", "policy_preprocessor.json"])
def test_a_missing_json_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=rf"cannot read '.*{name}': No such file"):
        load(folder)


def test_missing_statistics_are_refused(folder: Path) -> None:
    path = folder / "policy_preprocessor.json"

    def forget(content: dict[str, Any]) -> None:
        del content["steps"][3]["state_file"]

    edit_json(path, forget)
    with pytest.raises(CheckpointError, match="no step 'normalizer_processor' with statistics"):
        load(folder)


def test_statistics_of_another_mode_must_be_there(folder: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        content["steps"][3]["config"]["norm_map"]["ACTION"] = "MEAN_STD"

    edit_json(folder / "policy_preprocessor.json", change)
    with pytest.raises(CheckpointError, match="normalisation of 'action' needs the statistic 'mean', .* has: q01, q99"):
        load(folder)


def test_a_missing_statistics_file_is_named(folder: Path) -> None:
    next(folder.glob("policy_preprocessor_step_*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match=r"cannot read statistics '.*policy_preprocessor_step_3"):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunk": 10}, r"setting 'chunk' is 10, but checkpoint '.*' was trained with 16; remove the setting"),
        ({"image_size": 112}, r"'image_size' is 112, .* trained with 28"),
        ({"relative_actions": False}, r"'relative_actions' is False, .* trained with True"),
        ({"state_in_prompt": False}, r"'state_in_prompt' is False, .* trained with True"),
        ({"views": ["wrist", "front"]}, r"'views' is \['wrist', 'front'\], expected some of \['front', 'wrist'\]"),
        ({"views": ["top"]}, r"'views' is \['top'\]"),
        ({"action_names": ["panda_joint9"]}, r"unknown action 'panda_joint9'; did you mean 'panda_joint\d'\?"),
        ({"state_names": ["a"]}, r"'state_names' has 1 names, but checkpoint '.*' has 8 states"),
        ({"prompt_buckets": [64, 256]}, r"'prompt_buckets' reaches 256 tokens, .* trained with at most 128"),
    ],
)
def test_a_setting_may_not_contradict_the_checkpoint(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load(folder, **changes)


def test_a_setting_that_agrees_is_accepted(folder: Path) -> None:
    assert load(folder, chunk=16, views=["front"], steps=2).config.steps == 2


def test_actions_are_chosen_and_ordered_by_name(folder: Path) -> None:
    chosen = ("panda_finger_joint1", "panda_joint4", "panda_joint1")
    permuted = chunk(load(folder, action_names=list(chosen)))
    assert np.array_equal(permuted, chunk(load(folder))[:, [ACTIONS.index(name) for name in chosen]])


def test_unnamed_actions_must_all_be_named_by_the_settings(folder: Path) -> None:
    def forget(config: dict[str, Any]) -> None:
        config.update(action_feature_names=None)

    def forget_step(content: dict[str, Any]) -> None:
        content["steps"][2]["config"].update(action_names=None)

    edit_json(folder / "config.json", forget)
    edit_json(folder / "policy_preprocessor.json", forget_step)
    assert load(folder).config.action_names == ACTIONS
    with pytest.raises(SettingsError, match="'action_names' has 2 names, but checkpoint '.*' has 8 actions"):
        load(folder, action_names=["panda_joint1", "panda_joint2"])


def test_an_excluded_part_of_a_name_keeps_an_action_absolute(folder: Path) -> None:
    def exclude(content: dict[str, Any]) -> None:
        content["steps"][2]["config"].update(exclude_joints=["JOINT7", "finger"])

    edit_json(folder / "policy_preprocessor.json", exclude)
    assert load(folder).config.absolute_actions == ("panda_joint7", "panda_finger_joint1")


def test_masked_cameras_of_training_are_no_views(folder: Path) -> None:
    def add(config: dict[str, Any]) -> None:
        config["input_features"]["observation.images.empty_camera_0"] = {"type": "VISUAL", "shape": [3, 28, 28]}

    edit_json(folder / "config.json", add)
    assert load(folder).views == ("front", "wrist")


def test_view_names_become_names_of_windows(folder: Path) -> None:
    def rename(config: dict[str, Any]) -> None:
        features = config["input_features"]
        features["observation.images.Wrist-Cam"] = features.pop("observation.images.wrist")

    edit_json(folder / "config.json", rename)
    assert set(load(folder).views) == {"front", "wrist_cam"}


def test_a_resolution_that_is_not_square_is_refused(folder: Path) -> None:
    edit_json(folder / "config.json", lambda config: config.update(image_resolution=[28, 56]))
    with pytest.raises(CheckpointError, match="image_resolution 28x56 is not square"):
        load(folder)


def test_a_tokenizer_beside_the_weights_is_used(folder: Path) -> None:
    (folder / "tokenizer.model").write_bytes(b"no tokenizer")
    with pytest.raises(SettingsError, match=r"tokenizer '.*/checkpoint/tokenizer.model' is not a SentencePiece model"):
        load(folder)


def test_the_true_preset_needs_a_tokenizer(folder: Path) -> None:
    config = resolve(SMALL).config
    sizes = {name: getattr(config, name) for name in TRUE_SIZES}
    with pytest.raises(PolicyError, match="setting 'tokenizer' is empty; set it to the path of PaliGemma's"):
        build({**sizes, "preset": "pi05", "checkpoint": str(folder), "state_names": list(config.state_names)})


TRUE_SIZES = (
    "vision_width", "vision_layers", "vision_heads", "vision_hidden", "layers", "head_dim", "vocabulary",
    "language_width", "language_hidden", "expert_width", "expert_hidden",
)  # fmt: skip


def test_the_true_size_has_the_official_number_of_parameters() -> None:
    true = Pi05Config(views=("top",), state_names=("a",), action_names=("a",))
    shapes = expected_shapes(true)
    assert len(shapes) == 811
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == 3_353_433_872


# -- loading -----------------------------------------------------------------------------------------------------------


def test_a_large_checkpoint_tells_how_far_loading_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load(folder)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("flashrt_ros.policies.pi05._WORTH_A_BAR", 1)
    load(folder)
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith("loading weights: ")
    assert told[-1].startswith("loading weights: 100 % of ")


def test_every_byte_of_the_file_is_accounted_for(folder: Path) -> None:
    config = resolve({**SIZES, "checkpoint": str(folder)}).config
    source, read = FileSource(folder / WEIGHTS, config), list[int]()
    load_weights(source, config, torch.device("cpu"), read.append)
    assert sum(read) == source.nbytes == sum(source.tensor(name).nbytes for name in source.names)
    assert min(read) >= 0


def test_a_bfloat16_file_keeps_its_bits(tmp_path: Path) -> None:
    config = resolve({**SMALL, "dtype": "bfloat16"}).config
    source = FileSource(write(tmp_path / "c", config, torch.bfloat16) / WEIGHTS, config)
    weights = load_weights(source, config, torch.device("cpu"))
    down = source.tensor("paligemma_with_expert.gemma_expert.model.layers.1.mlp.down_proj.weight")
    assert torch.equal(weights.expert.layers[1].down, down)
    assert torch.equal(weights.prefix.embedding, source.tensor(EMBEDDING))


def test_the_memory_that_a_configuration_takes_grows_with_what_it_holds() -> None:
    config = resolve(SMALL).config
    parameters = sum(math.prod(shape) for shape in expected_shapes(config).values())
    assert needed_bytes(config) > 4 * parameters
    larger = replace(config, max_pixels=config.max_pixels + (1 << 20))
    grown = needed_bytes(larger) - needed_bytes(config)
    assert grown == len(config.views) * (4 << 20)
