"""Reading and writing what LeRobot stores beside the weights of a pi05 policy."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from ..base import CheckpointError
from .checkpoint import CONFIG_FILE, Checkpoint, Normalisers, read_json
from .config import Pi05Config
from .normalisation import Normaliser, normaliser_from

_PREPROCESSOR = "policy_preprocessor.json"
_NORMALISER_STEP = "normalizer_processor"
_RELATIVE_STEP = "relative_actions_processor"
_STATE, _ACTION, _IMAGES = "observation.state", "action", "observation.images."
_EMPTY_CAMERA = "empty_camera_"  # views that training masked out; leaving them away is the same


def read_lerobot(folder: Path) -> Checkpoint:
    """The facts of a LeRobot folder; CheckpointError if it holds another policy or contradicts itself."""
    path = folder / CONFIG_FILE
    config = read_json(path)
    if config.get("type") != "pi05":
        raise CheckpointError(f"'{path}' describes a '{config.get('type')}' policy, expected 'pi05'")
    relative = _step(_preprocessor(folder), _RELATIVE_STEP)
    names = relative.get("action_names") or config.get("action_feature_names") or ()
    inputs, outputs = config.get("input_features") or {}, config.get("output_features") or {}
    return Checkpoint(
        folder=folder,
        fixed=_fixed(config, path),
        suggested={"steps": config["num_inference_steps"]} if "num_inference_steps" in config else {},
        views=tuple(_view_name(key) for key in inputs if key.startswith(_IMAGES) and _EMPTY_CAMERA not in key),
        state_width=_width(inputs, _STATE),
        action_width=_width(outputs, _ACTION),
        recorded_actions=tuple(names),
        excluded=tuple(relative.get("exclude_joints") or config.get("relative_exclude_joints") or ()),
        longest_prompt=int(config.get("tokenizer_max_length", 200)),
    )


def read_normalisers(folder: Path, state_width: int | None, action_width: int) -> Normalisers:
    """The statistics of a LeRobot folder's preprocessor.

    Args:
        state_width: unpadded width of the state, None where the model sees none.
        action_width: unpadded width of the action.
    """
    steps = _preprocessor(folder)
    config = _step(steps, _NORMALISER_STEP)
    state_file = next((s.get("state_file") for s in steps if s.get("registry_name") == _NORMALISER_STEP), None)
    if not state_file:
        raise CheckpointError(
            f"'{folder / _PREPROCESSOR}' has no step '{_NORMALISER_STEP}' with statistics; this checkpoint was saved before "
            "training on a data set, save it again with the data set's statistics"
        )
    statistics = _read_statistics(folder / state_file)
    modes, eps = config.get("norm_map") or {}, float(config.get("eps", 1e-8))

    def normaliser(feature: str, kind: str, width: int) -> Normaliser:
        own = {name[len(feature) + 1 :]: value for name, value in statistics.items() if name.startswith(f"{feature}.")}
        return normaliser_from(own, str(modes.get(kind, "IDENTITY")), width, eps=eps, what=feature)

    state = None if state_width is None else normaliser(_STATE, "STATE", state_width)
    return Normalisers(state, normaliser(_ACTION, "ACTION", action_width))


def write_lerobot(folder: Path, config: Pi05Config, state: Mapping[str, np.ndarray], action: Mapping[str, np.ndarray]) -> None:
    """Write everything but the weights, as LeRobot 0.6.1 would.

    Args:
        state, action: statistics ("q01", "q99") of the unpadded vectors, in the model's order.
    """
    folder.mkdir(parents=True, exist_ok=True)
    features = _features(config)
    _write_json(folder / CONFIG_FILE, _config_json(config, features))
    arrays = {f"{_STATE}.{name}": value for name, value in state.items()}
    arrays |= {f"{_ACTION}.{name}": value for name, value in action.items()}
    tensors = {name: np.ascontiguousarray(value, dtype=np.float32) for name, value in arrays.items()}
    for name, steps in _pipelines(config, features).items():
        for index, step in enumerate(steps):
            if step["registry_name"] in (_NORMALISER_STEP, "unnormalizer_processor"):
                step["state_file"] = f"{name}_step_{index}_{step['registry_name']}.safetensors"
                save_file(tensors, folder / step["state_file"])
        _write_json(folder / f"{name}.json", {"name": name, "steps": steps})


def _fixed(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    renamed = {"chunk": "chunk_size", "padded_width": "max_action_dim", "relative_actions": "use_relative_actions"}
    same = ("min_period", "max_period")
    fixed = {ours: config[theirs] for ours, theirs in renamed.items() if theirs in config}
    fixed |= {name: float(config[name]) for name in same if name in config}
    fixed["state_in_prompt"] = True  # LeRobot's pi05 has no other way
    if "image_resolution" in config:
        height, width = config["image_resolution"]
        if height != width:
            raise CheckpointError(f"'{path}': image_resolution {height}x{width} is not square, π0.5 needs a square")
        fixed["image_size"] = height
    return fixed


def _view_name(key: str) -> str:
    return re.sub(r"[^a-z0-9_.]", "_", key.removeprefix(_IMAGES).lower())


def _width(features: Mapping[str, Any], key: str) -> int | None:
    return int(features[key]["shape"][0]) if key in features else None


def _preprocessor(folder: Path) -> list[dict[str, Any]]:
    return list(read_json(folder / _PREPROCESSOR).get("steps") or ())


def _step(steps: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next((dict(step.get("config") or {}) for step in steps if step.get("registry_name") == name), {})


def _read_statistics(path: Path) -> dict[str, np.ndarray]:
    try:
        return dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read statistics '{path}': {error}; copy the file again") from None


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _features(config: Pi05Config) -> dict[str, dict[str, Any]]:
    image = {"type": "VISUAL", "shape": [3, config.image_size, config.image_size]}
    inputs: dict[str, Any] = {f"{_IMAGES}{view}": image for view in config.views}
    inputs[_STATE] = {"type": "STATE", "shape": [len(config.state_names)]}
    return {"input": inputs, "output": {_ACTION: {"type": "ACTION", "shape": [len(config.action_names)]}}}


_NORM_MAP = {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "QUANTILES"}


def _config_json(config: Pi05Config, features: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "pi05",
        "n_obs_steps": 1,
        "input_features": features["input"],
        "output_features": features["output"],
        "paligemma_variant": "gemma_2b",
        "action_expert_variant": "gemma_300m",
        "dtype": config.dtype,
        "chunk_size": config.chunk,
        "n_action_steps": config.chunk,
        "max_state_dim": config.padded_width,
        "max_action_dim": config.padded_width,
        "num_inference_steps": config.steps,
        "min_period": config.min_period,
        "max_period": config.max_period,
        "use_relative_actions": config.relative_actions,
        "relative_exclude_joints": list(config.absolute_actions),
        "action_feature_names": list(config.action_names),
        "image_resolution": [config.image_size, config.image_size],
        "tokenizer_max_length": config.prompt_buckets[-1],
        "normalization_mapping": _NORM_MAP,
    }


def _pipelines(config: Pi05Config, features: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    def step(name: str, **values: Any) -> dict[str, Any]:
        return {"registry_name": name, "config": values}

    relative = step(
        _RELATIVE_STEP,
        enabled=config.relative_actions,
        exclude_joints=list(config.absolute_actions),
        action_names=list(config.action_names),
    )
    everything = {**features["input"], **features["output"]}
    tokenizer = step(
        "tokenizer_processor", max_length=config.prompt_buckets[-1], task_key="task", padding_side="right",
        padding="max_length", truncation=True, tokenizer_name="google/paligemma-3b-pt-224",
    )  # fmt: skip
    return {
        "policy_preprocessor": [
            step("rename_observations_processor", rename_map={}),
            step("to_batch_processor"),
            relative,
            step(_NORMALISER_STEP, eps=1e-8, features=everything, norm_map=_NORM_MAP),
            step("pi05_prepare_state_tokenizer_processor_step"),
            tokenizer,
            step("device_processor", device="cpu", float_dtype=None),
        ],
        "policy_postprocessor": [
            step("unnormalizer_processor", eps=1e-8, features=features["output"], norm_map=_NORM_MAP),
            step("absolute_actions_processor", enabled=config.relative_actions),
            step("device_processor", device="cpu", float_dtype=None),
        ],
    }
