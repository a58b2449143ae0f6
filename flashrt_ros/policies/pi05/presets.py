"""The configurations that come with the package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

_ARM = tuple(f"panda_joint{i}" for i in range(1, 8))
_GRIPPER = "panda_finger_joint1"

_TINY: dict[str, Any] = {
    "preset": "pi05_tiny",
    "dtype": "float32",
    "prompt_buckets": (64, 128),
    "views": ("front", "wrist"),
    "state_names": (*_ARM, _GRIPPER),
    "action_names": (*_ARM, _GRIPPER),
    "action_dt": 0.05,
    "chunk": 16,
    "relative_actions": True,
    "absolute_actions": (_GRIPPER,),
    "image_size": 112,
    "vision_width": 160,
    "vision_layers": 3,
    "vision_heads": 4,
    "vision_hidden": 448,
    "layers": 3,
    "query_heads": 8,
    "key_heads": 1,
    "head_dim": 32,
    "vocabulary": 896,
    "language_width": 192,
    "language_hidden": 512,
    "expert_width": 128,
    "expert_hidden": 384,
}

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType({"pi05": {"preset": "pi05"}, "pi05_tiny": _TINY})
"""Preset name → the fields of Pi05Config in which it differs from the defaults."""


@dataclass(frozen=True)
class SeededPreset:
    """A preset that works without a checkpoint: its weights come from a seed, its tokenizer from this package."""

    seed: int
    tokenizer: Path


SEEDED_PRESETS: Mapping[str, SeededPreset] = MappingProxyType(
    {"pi05_tiny": SeededPreset(20262, Path(__file__).parent / "assets" / "tiny_tokenizer.model")}
)

JOINT_RANGES: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "panda_joint1": (-2.8973, 2.8973),
        "panda_joint2": (-1.7628, 1.7628),
        "panda_joint3": (-2.8973, 2.8973),
        "panda_joint4": (-3.0718, -0.0698),
        "panda_joint5": (-2.8973, 2.8973),
        "panda_joint6": (-0.0175, 3.7525),
        "panda_joint7": (-2.8973, 2.8973),
        _GRIPPER: (0.0, 0.04),
    }
)
"""Position limits in radians (the finger's in metres): what a seeded preset normalises with."""
