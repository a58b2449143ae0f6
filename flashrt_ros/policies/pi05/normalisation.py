"""Normalisation of states and actions with the statistics that a checkpoint was trained with."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..base import CheckpointError

Kind = Literal["range", "standard", "identity"]

# How LeRobot calls each mode, and the two statistics that it needs.
MODES: Mapping[str, tuple[Kind, str, str]] = {
    "QUANTILES": ("range", "q01", "q99"),
    "QUANTILE10": ("range", "q10", "q90"),
    "MIN_MAX": ("range", "min", "max"),
    "MEAN_STD": ("standard", "mean", "std"),
    "IDENTITY": ("identity", "", ""),
}


@dataclass(frozen=True)
class Normaliser:
    """Maps a vector to the model's units and back, in float32.

    "range" maps [low, low + span] to [-1, 1]; "standard" subtracts `low` and divides by `span` (+ eps, one way only, as
    the training code does); "identity" does nothing. `low` and `span` are float32[n], the unpadded width.
    """

    kind: Kind
    low: np.ndarray
    span: np.ndarray
    eps: float = 0.0

    @property
    def width(self) -> int:
        """Number of values in a vector."""
        return len(self.low)

    def normalise(self, x: np.ndarray) -> np.ndarray:
        """Robot's units → model's units; float32[..., n]."""
        value: np.ndarray = x.astype(np.float32)
        if self.kind == "range":
            value = np.float32(2) * (value - self.low) / self.span - np.float32(1)
        elif self.kind == "standard":
            value = (value - self.low) / (self.span + np.float32(self.eps))
        return value

    def unnormalise(self, y: np.ndarray) -> np.ndarray:
        """Model's units → robot's units; float32[..., n]."""
        value: np.ndarray = y.astype(np.float32)
        if self.kind == "range":
            value += np.float32(1)
            value *= self.span
            value /= np.float32(2)
            value += self.low
        elif self.kind == "standard":
            value *= self.span
            value += self.low
        return value

    def digest(self) -> str:
        """SHA-256 over everything that changes a result."""
        sha = hashlib.sha256(f"{self.kind} {self.eps!r} {self.width}".encode())
        sha.update(self.low.tobytes())
        sha.update(self.span.tobytes())
        return sha.hexdigest()


def range_normaliser(low: np.ndarray, high: np.ndarray, *, margin: float = 0.0, least: float = 1e-8) -> Normaliser:
    """The "range" normaliser of two statistics.

    Args:
        margin: added to every span (openpi adds 1e-6).
        least: stands in for a span of exactly 0 (LeRobot's eps).
    """
    low, high = np.asarray(low, np.float32), np.asarray(high, np.float32)
    span = high - low + np.float32(margin)
    return Normaliser("range", low, np.where(span == 0, np.float32(least), span).astype(np.float32))


def normaliser_from(
    statistics: Mapping[str, np.ndarray], mode: str, width: int, *, eps: float, what: str
) -> Normaliser:
    """The normaliser that LeRobot's `mode` means for `what` ("observation.state", "action").

    Raises:
        CheckpointError: unknown mode, a statistic that is missing, of another width than `width`, or not finite.
    """
    if mode not in MODES:
        raise CheckpointError(f"normalisation of '{what}' is '{mode}', expected one of {', '.join(MODES)}")
    kind, first, second = MODES[mode]
    if kind == "identity":
        return Normaliser("identity", np.zeros(width, np.float32), np.ones(width, np.float32))
    low, high = (_statistic(statistics, name, width, what, mode) for name in (first, second))
    if kind == "range":
        return range_normaliser(low, high, least=eps)
    return Normaliser("standard", low, high, eps)


def _statistic(statistics: Mapping[str, np.ndarray], name: str, width: int, what: str, mode: str) -> np.ndarray:
    if name not in statistics:
        known = ", ".join(sorted(statistics)) or "none"
        raise CheckpointError(
            f"{mode} normalisation of '{what}' needs the statistic '{name}', the checkpoint has: {known}"
        )
    value = np.asarray(statistics[name], np.float32)
    if value.shape != (width,):
        raise CheckpointError(f"statistic '{what}.{name}' has shape {list(value.shape)}, expected [{width}]")
    if not np.isfinite(value).all():
        raise CheckpointError(f"statistic '{what}.{name}' holds a value that is not finite")
    return value
