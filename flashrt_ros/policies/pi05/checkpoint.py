"""What a checkpoint folder says beside its weights: sizes, names, and how to normalise.

Two formats are read: LeRobot's (`config.json`, `policy_preprocessor.json`) and openpi's PyTorch conversion
(`config.json`, `assets/**/norm_stats.json`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..base import CheckpointError
from .normalisation import Normaliser

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class Checkpoint:
    """The facts of one folder.

    Attributes:
        fixed: fields of Pi05Config that the checkpoint decides; a setting may not contradict them.
        suggested: fields of Pi05Config that a setting may replace.
        views: view names in the model's order; empty if the folder does not say.
        undecided: fields that training decided but the folder does not record; they must be set.
        state_width, action_width: unpadded widths; None if the folder does not say.
        recorded_actions: action names in the model's order; empty if the folder does not say.
        excluded: parts of names whose actions stay absolute when actions are relative.
        longest_prompt: tokens that training allowed.
    """

    folder: Path
    fixed: Mapping[str, Any]
    suggested: Mapping[str, Any] = field(default_factory=dict)
    views: tuple[str, ...] = ()
    undecided: tuple[str, ...] = ()
    state_width: int | None = None
    action_width: int | None = None
    recorded_actions: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    longest_prompt: int = 200

    @property
    def weights(self) -> Path:
        """The weights file."""
        return self.folder / WEIGHTS_FILE

    def absolute_actions(self) -> tuple[str, ...]:
        """Recorded actions that stay absolute: those whose name contains an excluded part, in any case."""
        parts = [part.lower() for part in self.excluded if part]
        return tuple(name for name in self.recorded_actions if any(part in name.lower() for part in parts))


@dataclass(frozen=True)
class Normalisers:
    """How states enter the model (None if it sees none) and actions leave it, each of the unpadded width."""

    state: Normaliser | None
    action: Normaliser


def checkpoint_folder(path: str) -> Path:
    """`path` as a folder that holds a weights file; CheckpointError otherwise."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        what = "is a file, give the folder around it" if folder.is_file() else "does not exist"
        raise CheckpointError(f"checkpoint '{folder}' {what}; expected a folder with {WEIGHTS_FILE}")
    if not (folder / WEIGHTS_FILE).is_file():
        raise CheckpointError(f"checkpoint '{folder}' has no {WEIGHTS_FILE}; give the folder that training wrote it to")
    return folder


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; CheckpointError if the file is missing, malformed, or holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read '{path}': {error.strerror}; copy it from the training output") from None
    except ValueError as error:
        raise CheckpointError(f"'{path}' is not valid JSON ({error}); copy it again from the training output") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"'{path}' holds a {type(value).__name__}, expected a JSON object")
    return value
