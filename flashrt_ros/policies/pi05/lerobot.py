"""Reading what LeRobot stores beside the weights of a pi05 policy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from ..base import CheckpointError
from .checkpoint import CONFIG_FILE, Checkpoint, Normalisers, read_json
from .normalisation import Normaliser, normaliser_from

PREPROCESSOR = "policy_preprocessor.json"
NORMALISER_STEP = "normalizer_processor"
RELATIVE_STEP = "relative_actions_processor"
STATE, ACTION, IMAGES = "observation.state", "action", "observation.images."
_EMPTY_CAMERA = "empty_camera_"  # views that training masked out; leaving them away is the same


def read_lerobot(folder: Path) -> Checkpoint:
    """The facts of a LeRobot folder; CheckpointError if it holds another policy or contradicts itself."""
    path = folder / CONFIG_FILE
    config = read_json(path)
    if config.get("type") != "pi05":
        raise CheckpointError(f"'{path}' describes a '{config.get('type')}' policy, expected 'pi05'")
    relative = _step(_preprocessor(folder), RELATIVE_STEP)
    names = relative.get("action_names") or config.get("action_feature_names") or ()
    inputs, outputs = config.get("input_features") or {}, config.get("output_features") or {}
    return Checkpoint(
        folder=folder,
        fixed=_fixed(config, path) | ({"relative_actions": relative["enabled"]} if "enabled" in relative else {}),
        suggested={"steps": config["num_inference_steps"]} if "num_inference_steps" in config else {},
        views=tuple(_view_name(key) for key in inputs if key.startswith(IMAGES) and _EMPTY_CAMERA not in key),
        state_width=_width(inputs, STATE),
        action_width=_width(outputs, ACTION),
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
    config = _step(steps, NORMALISER_STEP)
    state_file = next((s.get("state_file") for s in steps if s.get("registry_name") == NORMALISER_STEP), None)
    if not state_file:
        raise CheckpointError(
            f"'{folder / PREPROCESSOR}' has no step '{NORMALISER_STEP}' with statistics; this checkpoint was saved "
            "before training on a data set, save it again with the data set's statistics"
        )
    statistics = _read_statistics(folder / state_file)
    modes, eps = config.get("norm_map") or {}, float(config.get("eps", 1e-8))

    def normaliser(feature: str, kind: str, width: int) -> Normaliser:
        own = {name[len(feature) + 1 :]: value for name, value in statistics.items() if name.startswith(f"{feature}.")}
        return normaliser_from(own, str(modes.get(kind, "IDENTITY")), width, eps=eps, what=feature)

    state = None if state_width is None else normaliser(STATE, "STATE", state_width)
    return Normalisers(state, normaliser(ACTION, "ACTION", action_width))


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
    return re.sub(r"[^a-z0-9_.]", "_", key.removeprefix(IMAGES).lower())


def _width(features: Mapping[str, Any], key: str) -> int | None:
    return int(features[key]["shape"][0]) if key in features else None


def _preprocessor(folder: Path) -> list[dict[str, Any]]:
    return list(read_json(folder / PREPROCESSOR).get("steps") or ())


def _step(steps: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next((dict(step.get("config") or {}) for step in steps if step.get("registry_name") == name), {})


def _read_statistics(path: Path) -> dict[str, np.ndarray]:
    try:
        return dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read statistics '{path}': {error}; copy the file again") from None
