"""A checkpoint and photographs so small that everything runs in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from flashrt_ros.measure.pi05.checkpoint import checkpoint_config, default_settings, make_checkpoint
from flashrt_ros.measure.pi05.observations import Pixels
from flashrt_ros.policies.pi05.config import Pi05Config

SIZES: dict[str, Any] = {
    "image_size": 28, "patch_size": 14, "vision_width": 64, "vision_layers": 2, "vision_heads": 4, "vision_hidden": 96,
    "layers": 3, "query_heads": 8, "key_heads": 1, "head_dim": 16, "vocabulary": 896, "language_width": 64,
    "language_hidden": 128, "expert_width": 48, "expert_hidden": 96,
}  # fmt: skip


def tiny_config(**changes: Any) -> Pi05Config:
    return checkpoint_config("pi05", **{**SIZES, "chunk": 6, "dtype": "float32", **changes})


def write_tiny(folder: Path, seed: int = 0, **changes: Any) -> Path:
    make_checkpoint(folder, tiny_config(**changes), seed)
    return folder


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "preset": "pi05",
        "dtype": "float32",
        **SIZES,
        **default_settings(folder),
        "checkpoint": str(folder),
        "max_pixels": 800 * 600,
        **changes,
    }


def pictures(count: int = 2) -> list[Pixels]:
    """Not photographs, but of many colours and with edges."""
    generator = np.random.default_rng(5)
    coarse = generator.integers(0, 256, (count, 12, 16, 3), np.uint8)
    return [np.ascontiguousarray(image.repeat(20, axis=0).repeat(20, axis=1)) for image in coarse]
