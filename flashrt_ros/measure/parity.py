"""Comparing two implementations of one policy with a third, more exact one. Arrays in, figures and a verdict out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .circumstances import significant

COSINE_GLOBAL, COSINE_WORST = 0.9999, 0.9995


@dataclass(frozen=True)
class Distances:
    """How far a set of action chunks is from the reference.

    Attributes:
        cosine_global: of all values as one vector.
        cosine_worst, worst: smallest cosine of one observation, and which one that is.
        cosine_flow: cosine_global of actions minus noise, the part that the model decides.
        relative_error: |actions - reference| / |reference| over all values, 2-norm.
        max_abs_per_dim: largest difference of each action dimension.
    """

    cosine_global: float
    cosine_worst: float
    worst: int
    cosine_flow: float
    relative_error: float
    max_abs_per_dim: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; cosines keep nine digits, because they differ in the fifth."""
        values = asdict(self)
        values["max_abs_per_dim"] = [significant(value) for value in self.max_abs_per_dim]
        values["relative_error"] = significant(self.relative_error)
        return values | {name: round(values[name], 9) for name in ("cosine_global", "cosine_worst", "cosine_flow")}


def distances(actions: np.ndarray, reference: np.ndarray, noise: np.ndarray) -> Distances:
    """Compare float[observations, chunk, dimensions]; a value that is not finite makes every figure the worst one."""
    a, b = actions.astype(np.float64), reference.astype(np.float64)
    if a.shape != b.shape or a.shape != noise.shape:
        raise ValueError(f"cannot compare actions of shape {a.shape} with {b.shape} and noise of {noise.shape}")
    if not np.isfinite(a).all():
        bad = int(np.flatnonzero(~np.isfinite(a).all(axis=(1, 2)))[0])
        return Distances(-1.0, -1.0, bad, -1.0, float("inf"), (float("inf"),) * a.shape[2])
    each = [cosine(x, y) for x, y in zip(a, b, strict=True)]
    worst = int(np.argmin(each))
    return Distances(
        cosine_global=cosine(a, b),
        cosine_worst=each[worst],
        worst=worst,
        cosine_flow=cosine(a - noise, b - noise),
        relative_error=float(np.linalg.norm(a - b) / np.linalg.norm(b)),
        max_abs_per_dim=tuple(np.abs(a - b).max(axis=(0, 1)).tolist()),
    )


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Cosine of the angle between two arrays as vectors; 0 if one of them is all zero."""
    x, y = a.reshape(-1), b.reshape(-1)
    norms = float(np.linalg.norm(x) * np.linalg.norm(y))
    return float(x @ y) / norms if norms else 0.0


@dataclass
class LayerErrors:
    """Relative error of keys and values of every layer, gathered over many observations."""

    squared: Tensor = field(default_factory=lambda: torch.zeros(0))
    norm: Tensor = field(default_factory=lambda: torch.zeros(0))

    def add(self, key_value: Tensor, reference: Tensor) -> None:
        """Count float[layers, 2, rows, width] in."""
        if key_value.shape != reference.shape:
            raise ValueError(f"cannot compare keys and values of {key_value.shape} with {reference.shape}")
        exact = reference.double()
        squared = (key_value.double() - exact).square().sum((2, 3)).cpu()
        norm = exact.square().sum((2, 3)).cpu()
        empty = not self.norm.numel()
        self.squared, self.norm = (squared, norm) if empty else (self.squared + squared, self.norm + norm)

    def to_list(self) -> list[dict[str, float]]:
        """One {"key", "value"} of relative errors a layer."""
        errors = (self.squared / self.norm).sqrt().tolist()
        return [{"key": significant(key), "value": significant(value)} for key, value in errors]


def failures(ours: Mapping[int, Distances], official: Mapping[int, Distances]) -> list[str]:
    """What is below the bar, one sentence each; empty if all is well.

    Args:
        ours: by number of steps, our distances from the official model in float32.
        official: the same of the official model in its own 16-bit precision.
    """
    found: list[str] = []
    for steps, own in ours.items():
        theirs = official[steps]
        checks: Sequence[tuple[bool, str]] = (
            (own.cosine_global >= COSINE_GLOBAL, f"global cosine {own.cosine_global:.6f} is below {COSINE_GLOBAL}"),
            (
                own.cosine_worst >= COSINE_WORST,
                f"cosine {own.cosine_worst:.6f} of observation {own.worst} is below {COSINE_WORST}",
            ),
            (
                own.relative_error <= theirs.relative_error,
                f"relative error {own.relative_error:.3g} is above that of the official bfloat16 model "
                f"({theirs.relative_error:.3g})",
            ),
        )
        found += [f"{steps} step{'s' if steps != 1 else ''}: {text}" for holds, text in checks if not holds]
    return found
