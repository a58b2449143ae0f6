"""Reading what openpi's PyTorch conversion stores beside the weights of a pi05 model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..base import CheckpointError
from .checkpoint import CONFIG_FILE, Checkpoint, Normalisers, read_json
from .normalisation import Normaliser, range_normaliser

_VIEWS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
_MARGIN = 1e-6  # that openpi adds to every quantile span
# What openpi decides in its training configuration, which is not part of the folder.
_UNDECIDED = ("state_in_prompt", "relative_actions", "action_names")


def is_openpi(folder: Path) -> bool:
    """Whether `folder` looks like openpi's: its config has `action_horizon`, or there is none but there are assets."""
    path = folder / CONFIG_FILE
    return "action_horizon" in read_json(path) if path.is_file() else (folder / "assets").is_dir()


def read_openpi(folder: Path) -> Checkpoint:
    """The facts of an openpi folder."""
    path = folder / CONFIG_FILE
    config = read_json(path) if path.is_file() else {}
    renamed = {"chunk": "action_horizon", "padded_width": "action_dim"}
    fixed = {ours: int(config[theirs]) for ours, theirs in renamed.items() if theirs in config}
    return Checkpoint(folder=folder, fixed=fixed, views=_VIEWS, undecided=_UNDECIDED)


def read_openpi_normalisers(folder: Path, asset: str, state_width: int | None, action_width: int) -> Normalisers:
    """The quantiles of an openpi folder.

    Args:
        asset: which `assets/<asset>/norm_stats.json`; empty if there is only one.
        state_width: unpadded width of the state, None where the model sees none.
        action_width: unpadded width of the action.
    """
    path = _statistics_file(folder, asset)
    statistics = read_json(path).get("norm_stats")
    if not isinstance(statistics, dict):
        raise CheckpointError(f"'{path}' has no object 'norm_stats'; this is not openpi's statistics file")
    state = None if state_width is None else _quantiles(statistics, "state", state_width, path)
    return Normalisers(state, _quantiles(statistics, "actions", action_width, path))


def _statistics_file(folder: Path, asset: str) -> Path:
    assets = folder / "assets"
    found = {str(path.parent.relative_to(assets)): path for path in sorted(assets.glob("**/norm_stats.json"))}
    if not found:
        raise CheckpointError(f"'{assets}' holds no norm_stats.json; copy the assets folder of the training run")
    if asset not in found and (asset or len(found) > 1):
        wrong = f"has no '{asset}'" if asset else "has several statistics"
        raise CheckpointError(f"'{assets}' {wrong}; set 'asset' to one of: {', '.join(found)}")
    return found[asset] if asset else next(iter(found.values()))


def _quantiles(statistics: Mapping[str, Any], key: str, width: int, path: Path) -> Normaliser:
    entry = statistics.get(key) or {}
    bounds = []
    for name in ("q01", "q99"):
        value = np.asarray(entry.get(name) if entry.get(name) is not None else (), np.float32)
        if value.ndim != 1 or len(value) < width or not np.isfinite(value).all():
            raise CheckpointError(
                f"'{path}': '{key}.{name}' has shape {list(value.shape)}, expected at least {width} finite values"
            )
        bounds.append(value[:width])
    return range_normaliser(bounds[0], bounds[1], margin=_MARGIN)
