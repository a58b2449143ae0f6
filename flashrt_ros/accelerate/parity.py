"""The parity gate: results of a candidate against those of the original, example by example."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .gates import Gates
from .values import tensors

_FLOOR = 0.1  # of the average size of a dimension; see Gates.dimension_error


@dataclass(frozen=True)
class Parity:
    """How far a candidate is from the original.

    Attributes:
        cosine_global, cosine_worst: see `Gates`; `worst` is the number of the worst example.
        dimension_error: largest relative error of one output dimension, `dimension` is which (of which output: "1[3]").
        failure: why the gate refuses it; empty if it passes.
    """

    cosine_global: float
    cosine_worst: float
    worst: int
    dimension_error: float
    dimension: str
    failure: str = ""

    @property
    def passed(self) -> bool:
        """Whether the gate lets it through."""
        return not self.failure

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; cosines keep nine digits, as they differ in the fifth. Infinity becomes None."""
        error = self.dimension_error
        return {
            "passed": self.passed,
            "cosine_global": round(self.cosine_global, 9),
            "cosine_worst": round(self.cosine_worst, 9),
            "worst_example": self.worst,
            "dimension_error": float(f"{error:.4g}") if math.isfinite(error) else None,
            "worst_dimension": self.dimension,
        }


def compare(results: Sequence[Any], originals: Sequence[Any], gates: Gates) -> Parity:
    """Compare trees of tensors, one an example. Float tensors are measured, all others must be equal."""
    pairs = [(tensors(result), tensors(original)) for result, original in zip(results, originals, strict=True)]
    for index, (mine, theirs) in enumerate(pairs):
        failure = _unlike(mine, theirs)
        if failure:
            return Parity(-1.0, -1.0, index, math.inf, "", f"example {index}: {failure}")
    floats = [[(a.double(), b.double()) for a, b in zip(*pair, strict=True) if b.is_floating_point()] for pair in pairs]
    angles = [_angle(example) for example in floats]
    worst = min(range(len(angles)), key=angles.__getitem__)
    error, dimension = _worst_dimension(floats)
    parity = Parity(_angle([pair for example in floats for pair in example]), angles[worst], worst, error, dimension)
    return _judged(parity, gates)


def _judged(parity: Parity, gates: Gates) -> Parity:
    checks = (
        (parity.cosine_global, gates.cosine_global, "global cosine", True),
        (parity.cosine_worst, gates.cosine_worst, f"cosine of example {parity.worst}", True),
        (parity.dimension_error, gates.dimension_error, f"relative error of dimension {parity.dimension}", False),
    )
    for value, limit, name, above in checks:
        if not (value >= limit if above else value <= limit):  # written so that NaN fails
            side = "below" if above else "above"
            failure = f"{name} is {value:.6g}, {side} {limit:g}"
            return Parity(**{**vars(parity), "failure": failure})
    return parity


def _unlike(mine: list[Tensor], theirs: list[Tensor]) -> str:
    """What makes two lists of tensors incomparable or plainly different; empty if nothing does."""
    if len(mine) != len(theirs):
        return f"{len(mine)} tensors come back, expected {len(theirs)}"
    for index, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"output {index} is {a.dtype}{list(a.shape)}, expected {b.dtype}{list(b.shape)}"
        if not b.is_floating_point():
            if not torch.equal(a, b):
                return f"output {index} ({b.dtype}) differs"
        elif not torch.equal(torch.isfinite(a), torch.isfinite(b)):
            return f"output {index} has values that are not finite where the original's are"
    return ""


def _angle(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """Cosine of all pairs as one vector, over finite values; 1 for two zero vectors."""
    dot = a2 = b2 = 0.0
    for a, b in pairs:
        finite = torch.isfinite(b)
        x, y = a[finite], b[finite]
        dot, a2, b2 = dot + float(x @ y), a2 + float(x @ x), b2 + float(y @ y)
    if a2 == 0 and b2 == 0:
        return 1.0
    return dot / math.sqrt(a2 * b2) if a2 and b2 else 0.0


def _worst_dimension(examples: list[list[tuple[Tensor, Tensor]]]) -> tuple[float, str]:
    """Largest relative error along the last axis over all examples, and where."""
    worst, where = 0.0, ""
    for index in range(len(examples[0])):
        if examples[0][index][1].ndim == 0 or not all(pair[index][1].numel() for pair in examples):
            continue
        error, size = _by_dimension([pair[index] for pair in examples])
        relative = error / torch.maximum(size, _FLOOR * size.square().mean().sqrt()).clamp_min(1e-300)
        value, dimension = (t.item() for t in relative.max(0))
        if not value <= worst:
            worst, where = float(value), f"{index}[{int(dimension)}]"
    return worst, where


def _by_dimension(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """2-norms of the difference and of the original for each entry of the last axis (all of it if lengths vary)."""
    rows = [(a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])) for a, b in pairs]
    if len({b.shape[1] for _, b in rows}) > 1:
        rows = [(a.reshape(-1, 1), b.reshape(-1, 1)) for a, b in rows]
    mine, theirs = torch.cat([a for a, _ in rows]), torch.cat([b for _, b in rows])
    finite = torch.isfinite(theirs)
    difference = torch.where(finite, mine - theirs, 0)
    return difference.norm(dim=0), torch.where(finite, theirs, 0).norm(dim=0)
