"""Weights and statistics from a seed, for the presets that say so. Untrained: for trying things out, not for a robot.

Plain random weights would turn noise into noise. These are random too, but the two ends of the expert are arranged so
that each Euler step shrinks the noise: what is left is what image, instruction and position make of it, which moves
smoothly. Nothing of the architecture is special, so the file that they make is an ordinary checkpoint.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ..base import SettingsError
from .checkpoint import Normalisers
from .config import Pi05Config
from .layout import EMBEDDING, EXPERT, VISION, Shape, expected_shapes
from .normalisation import Normaliser, range_normaliser
from .presets import JOINT_RANGES, SEEDED_PRESETS
from .source import MemorySource

_REACH = 0.2  # rad: normalised 1 of a relative action
_ENTRY = 0.25  # how strongly an action value enters its own channel of the residual
_CARRIER = 1.0  # constant in the other channels; it keeps the norm, and so the contraction, steady
_CONTRACTION = 6.0  # of the flow: velocity = contraction * (action - target)
_BRANCH_GATE = 0.04  # mean gate of the expert's branches
_SHARPNESS = 3.0  # of attention: with smaller queries it would average everything away


def seeded_source(config: Pi05Config) -> MemorySource:
    """The weights of a seeded preset, always the same."""
    seed = SEEDED_PRESETS[config.preset].seed
    return MemorySource(seeded_tensors(config, seed), config, f"preset '{config.preset}'")


def missing_checkpoint(preset: str) -> str:
    """Text for a preset that was asked for without a checkpoint."""
    return (
        f"preset '{preset}' has no weights of its own; set 'checkpoint' to the folder of a trained model, "
        f"or 'preset' to one with seeded weights: {', '.join(SEEDED_PRESETS)}"
    )


def seeded_tensors(config: Pi05Config, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Every tensor of a checkpoint of any size, by LeRobot's name: drawn in float32 from `seed`, cast to `dtype`."""
    if config.padded_width >= config.expert_width:
        raise SettingsError(
            f"seeded weights need expert_width ({config.expert_width}) above padded_width ({config.padded_width})"
        )
    generator = torch.Generator().manual_seed(seed)
    shapes = sorted(expected_shapes(config).items())
    tensors = {name: _drawn(name, shape, generator).to(dtype) for name, shape in shapes}
    _arrange_ends(tensors, config)
    return tensors


def seeded_normalisers(config: Pi05Config) -> Normalisers:
    """Statistics for the joints of `config`: known limits, or a half turn each way for a joint that is not known."""
    state = range_normaliser(*_bounds([JOINT_RANGES.get(name, (-math.pi, math.pi)) for name in config.state_names]))
    return Normalisers(state if config.state_in_prompt else None, _action_normaliser(config))


def _action_normaliser(config: Pi05Config) -> Normaliser:
    width = max(config.action_columns) + 1
    ranges = [(-1.0, 1.0)] * width
    for name, column in zip(config.action_names, config.action_columns, strict=True):
        moves = config.relative_actions and name not in config.absolute_actions
        ranges[column] = (-_REACH, _REACH) if moves else JOINT_RANGES.get(name, (-1.0, 1.0))
    return range_normaliser(*_bounds(ranges))


def _bounds(ranges: list[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    array = np.array(ranges, np.float32).reshape(-1, 2)
    return array[:, 0], array[:, 1]


def _drawn(name: str, shape: Shape, generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if name == EMBEDDING:
        return noise / math.sqrt(shape[1])
    if ".dense." in name:
        return _modulation(name, noise)
    if "norm" in name:
        # LayerNorm's weight stands for itself, RMSNorm's is added to one.
        return 0.1 * noise + (1.0 if name.startswith(VISION) and name.endswith(".weight") else 0.0)
    if name.endswith(".bias") or "position" in name:
        return 0.02 * noise
    scale = 1 / math.sqrt(math.prod(shape[1:]))
    return noise * scale * (_SHARPNESS if "q_proj" in name else 1.0)


def _modulation(name: str, noise: Tensor) -> Tensor:
    """Dense layer of an adaptive norm: scale, shift, gate. Alive in all three, with a steady part in the gate."""
    value = 0.007 * noise
    if name.endswith(".bias"):
        value[2 * len(value) // 3 :] += _BRANCH_GATE
    return value


def _arrange_ends(tensors: dict[str, Tensor], config: Pi05Config) -> None:
    width, actions = config.expert_width, config.padded_width
    diagonal = torch.arange(actions)
    tensors["action_in_proj.weight"] *= 0.1
    tensors["action_in_proj.weight"][diagonal, diagonal] += _ENTRY
    carrier = torch.where(torch.arange(width) % 2 == 0, _CARRIER, -_CARRIER)
    carrier[:actions] = 0  # the first channels are the actions' own
    tensors["action_in_proj.bias"] += carrier
    rms = math.sqrt(carrier.square().mean().item())
    tensors["action_out_proj.weight"] *= 0.1
    tensors["action_out_proj.weight"][diagonal, diagonal] += _CONTRACTION * rms / _ENTRY
    tensors[f"{EXPERT}.norm.dense.bias"] *= 0.1
