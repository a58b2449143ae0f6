"""A checkpoint to measure with, in LeRobot's own format, and cuts of one for other views and chunk lengths."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ...policies.pi05.checkpoint import CONFIG_FILE, WEIGHTS_FILE, Normalisers, read_json
from ...policies.pi05.config import Pi05Config
from ...policies.pi05.lerobot import IMAGES
from ...policies.pi05.lerobot_writer import write_description
from ...policies.pi05.normalisation import Normaliser
from ...policies.pi05.presets import PRESETS, SEEDED_PRESETS
from ...policies.pi05.seeded import seeded_normalisers
from ..errors import MeasureError
from .random_weights import write_random_weights

VIEWS = ("front", "left_wrist", "right_wrist")
_TINY = PRESETS["pi05_tiny"]
_TORCH = {"bfloat16": torch.bfloat16, "float32": torch.float32}
TOKENIZER_FILE = "tokenizer.model"


def checkpoint_config(preset: str, *, views: Sequence[str] = VIEWS, **changes: Any) -> Pi05Config:
    """The configuration of a checkpoint of `preset`'s sizes for an arm with seven joints and a gripper."""
    names = {name: _TINY[name] for name in ("state_names", "action_names")}
    return Pi05Config(**{**PRESETS[preset], **names, "relative_actions": False, "absolute_actions": (),
                         "views": tuple(views), **changes})  # fmt: skip


def make_checkpoint(folder: Path, config: Pi05Config, seed: int) -> int:
    """Write weights, description and a tokenizer into `folder`; returns the bytes of the weights.

    The tokenizer is the small one of this package, because PaliGemma's may not be passed on; its ids are valid ones.
    """
    folder.mkdir(parents=True, exist_ok=True)
    normalisers: Normalisers = seeded_normalisers(config)
    state = normalisers.state
    if state is None:
        raise MeasureError("a checkpoint without the state in its prompt is not LeRobot's; set state_in_prompt")
    size = write_random_weights(folder / WEIGHTS_FILE, config, seed, _TORCH[config.dtype])
    write_description(folder, config, _quantiles(state), _quantiles(normalisers.action))
    shutil.copyfile(SEEDED_PRESETS["pi05_tiny"].tokenizer, folder / TOKENIZER_FILE)
    return size


def _quantiles(normaliser: Normaliser) -> dict[str, Any]:
    return {"q01": normaliser.low, "q99": normaliser.low + normaliser.span}


def cut(source: Path, target: Path, *, views: int | None = None, chunk: int | None = None) -> Path:
    """A folder like `source` that says other things about the same weights: the first `views` cameras, another chunk.

    Neither changes a tensor, so the weights are linked, not copied. Everything but `config.json` is a link.
    """
    config = read_json(source / CONFIG_FILE)
    if chunk is not None:
        config |= {"chunk_size": chunk, "n_action_steps": chunk}
    if views is not None:
        config["input_features"] = _first_views(config["input_features"], views)
    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.name != CONFIG_FILE:
            (target / path.name).symlink_to(path.resolve())
    (target / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return target


def _first_views(features: dict[str, Any], views: int) -> dict[str, Any]:
    cameras = [name for name in features if name.startswith(IMAGES)]
    if not 0 < views <= len(cameras):
        raise MeasureError(f"{views} views were asked for, the checkpoint has {len(cameras)}: {', '.join(cameras)}")
    return {name: value for name, value in features.items() if name not in cameras[views:]}


def default_settings(folder: Path) -> dict[str, Any]:
    """Settings that LeRobot's folder leaves open and a measurement does not care about: names for the state's values.

    The recorded action names serve where there are as many of them (relative actions need equal names), and
    `action_names` are made up where the folder records none.
    """
    config = read_json(folder / CONFIG_FILE)
    recorded = list(config.get("action_feature_names") or ())
    settings: dict[str, Any] = {}
    state = (config.get("input_features") or {}).get("observation.state", {}).get("shape")
    action = (config.get("output_features") or {}).get("action", {}).get("shape")
    if not recorded and action:
        settings["action_names"] = recorded = [f"action_{i}" for i in range(int(action[0]))]
    if state:
        width = int(state[0])
        settings["state_names"] = recorded if width == len(recorded) else [f"state_{i}" for i in range(width)]
    return settings
