"""The decisions that LeRobot itself made (scripts/make_golden_pi05.py), and a policy on the same checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from flashrt_ros.policies.pi05.presets import SEEDED_PRESETS

FOLDER = Path(__file__).parents[2] / "golden" / "pi05_tiny"
FACTS: dict[str, Any] = json.loads((FOLDER / "cases.json").read_text())
JOINTS: tuple[str, ...] = tuple(FACTS["joints"])
VIEWS: tuple[str, ...] = tuple(FACTS["views"])


@dataclass(frozen=True)
class Case:
    """One recorded decision: its arrays by name, and its texts."""

    index: int
    task: str
    text: str

    def __getitem__(self, name: str) -> np.ndarray:
        return _arrays()[f"{self.index}.{name}"]


CASES = tuple(Case(index, **texts) for index, texts in enumerate(FACTS["cases"]))


def settings(**changes: Any) -> dict[str, Any]:
    """Settings that fit the recorded checkpoint."""
    return {
        "preset": "pi05",
        "dtype": "float32",
        "checkpoint": str(FOLDER),
        "tokenizer": str(SEEDED_PRESETS["pi05_tiny"].tokenizer),
        "state_names": list(JOINTS),
        "max_pixels": 128 * 128,
        **FACTS["sizes"],
        **changes,
    }


@cache
def _arrays() -> dict[str, np.ndarray]:
    return dict(load_file(FOLDER / "cases.safetensors"))
