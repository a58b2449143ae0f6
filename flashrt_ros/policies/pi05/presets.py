"""The two configurations that come with the package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

TINY_SEED = 20261
TINY_TOKENIZER = Path(__file__).parent / "assets" / "tiny_tokenizer.model"

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
    "vision_width": 192,
    "vision_layers": 3,
    "vision_heads": 4,
    "vision_hidden": 512,
    "layers": 4,
    "query_heads": 8,
    "key_heads": 1,
    "head_dim": 32,
    "vocabulary": 1024,
    "language_width": 256,
    "language_hidden": 768,
    "expert_width": 128,
    "expert_hidden": 384,
}

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType({"pi05": {"preset": "pi05"}, "pi05_tiny": _TINY})
"""Preset name → the fields of Pi05Config in which it differs from the defaults."""

# Joint limits of the arm in radians, of one finger in metres: the tiny preset's state quantiles.
_LIMITS = (
    (-2.8973, 2.8973), (-1.7628, 1.7628), (-2.8973, 2.8973), (-3.0718, -0.0698), (-2.8973, 2.8973),
    (-0.0175, 3.7525), (-2.8973, 2.8973), (0.0, 0.04),
)  # fmt: skip
_REACH = 0.2  # radians that one chunk of the tiny preset may move an arm joint

TINY_STATE_RANGE = tuple(zip(*_LIMITS, strict=True))
TINY_ACTION_RANGE = tuple(zip(*[(-_REACH, _REACH)] * len(_ARM), _LIMITS[-1], strict=True))
