"""Writing a checkpoint in LeRobot's own format, from a seed or from tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file as save_tensors
from torch import Tensor

from .checkpoint import CONFIG_FILE, WEIGHTS_FILE
from .config import Pi05Config
from .layout import EMBEDDING, EXPERT_HEAD, TIED_EMBEDDING
from .lerobot import ACTION, IMAGES, NORMALISER_STEP, RELATIVE_STEP, STATE

Statistics = Mapping[str, np.ndarray]


def write_checkpoint(
    folder: Path, config: Pi05Config, tensors: Mapping[str, Tensor], state: Statistics, action: Statistics
) -> None:
    """Write a folder that LeRobot 0.6.1 and this package both load.

    Args:
        folder: created if it is missing; files of the same names are overwritten.
        tensors: every tensor of `expected_shapes(config)`, by its name there.
        state, action: statistics ("q01", "q99") of the unpadded vectors, in the model's order.
    """
    write_description(folder, config, state, action)
    _write_weights(folder / WEIGHTS_FILE, config, tensors)


def write_description(folder: Path, config: Pi05Config, state: Statistics, action: Statistics) -> None:
    """Write everything but the weights: `config.json` and both processor pipelines with their statistics."""
    folder.mkdir(parents=True, exist_ok=True)
    features = _features(config)
    _write_json(folder / CONFIG_FILE, _config_json(config, features))
    arrays = {f"{STATE}.{name}": value for name, value in state.items()}
    arrays |= {f"{ACTION}.{name}": value for name, value in action.items()}
    arrays = {name: np.ascontiguousarray(value, dtype=np.float32) for name, value in arrays.items()}
    for name, steps in _pipelines(config, features).items():
        for index, step in enumerate(steps):
            if step["registry_name"] in (NORMALISER_STEP, "unnormalizer_processor"):
                step["state_file"] = f"{name}_step_{index}_{step['registry_name']}.safetensors"
                save_arrays(arrays, folder / step["state_file"])
        _write_json(folder / f"{name}.json", {"name": name, "steps": steps})


def _write_weights(path: Path, config: Pi05Config, tensors: Mapping[str, Tensor]) -> None:
    embedding = tensors[EMBEDDING]
    # LeRobot refuses a file without the two output heads, although neither is ever used.
    heads = {
        TIED_EMBEDDING: embedding.clone(),
        EXPERT_HEAD: torch.zeros(config.vocabulary, config.expert_width, dtype=embedding.dtype),
    }
    save_tensors({f"model.{name}": tensor.contiguous() for name, tensor in {**tensors, **heads}.items()}, path)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _features(config: Pi05Config) -> dict[str, dict[str, Any]]:
    image = {"type": "VISUAL", "shape": [3, config.image_size, config.image_size]}
    inputs: dict[str, Any] = {f"{IMAGES}{view}": image for view in config.views}
    inputs[STATE] = {"type": "STATE", "shape": [len(config.state_names)]}
    return {"input": inputs, "output": {ACTION: {"type": "ACTION", "shape": [len(config.action_names)]}}}


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
        RELATIVE_STEP,
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
            step(NORMALISER_STEP, eps=1e-8, features=everything, norm_map=_NORM_MAP),
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
