"""The two gates that everything faster must pass, and how strict they are."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .errors import AccelerateError

FEWEST_ROUNDS = 6  # below, no 95 % interval of a median exists that needs no assumption


@dataclass(frozen=True)
class Gates:
    """Limits of parity and latency. The original on the same inputs and random seed is the measure of both.

    Parity, on every example; a value that is not finite where the original's is finite fails:

    Attributes:
        cosine_global: of all values of all examples as one vector. 0.9999 is an angle of 0.8 degrees, a relative error
            of 1.4 %; two correct bfloat16 pipelines of 18 layers lie 0.6 % apart, an FP8 one about 3 %.
        cosine_worst: of the worst example, so that many good ones do not hide it. 0.9995 is a relative error of 3.2 %.
        dimension_error: largest relative error (2-norm) of one output dimension, the last axis. A cosine over all
            dimensions does not see that the one for the gripper is wrong, and none sees a wrong scale. 0.05 is three
            times what the global cosine allows on average. A dimension whose size is below a tenth of the average's is
            compared with that tenth, as its own size may be rounding.
        speedup: of the complete call in its final form, at least, against the original. Below 1.02 a change is not
            worth the risk.
        confidence: of the interval of the speed-up, which must lie above 1.

    Effort:

    Attributes:
        rounds: interleaved rounds of a latency comparison, at least 6.
        turn_s: length of a turn, which has at least `fewest_calls` calls.
        most_sets: sets of candidates that the search tries at most.
        misses: calls outside a guard, in a row, after which the site detaches itself.
    """

    cosine_global: float = 0.9999
    cosine_worst: float = 0.9995
    dimension_error: float = 0.05
    speedup: float = 1.02
    confidence: float = 0.95
    rounds: int = 11
    turn_s: float = 0.05
    fewest_calls: int = 3
    most_sets: int = 32
    misses: int = 32

    def __post_init__(self) -> None:
        for name in ("cosine_global", "cosine_worst"):
            _demand(-1 <= getattr(self, name) <= 1, name, getattr(self, name), "a cosine")
        _demand(self.dimension_error > 0, "dimension_error", self.dimension_error, "above 0")
        _demand(self.speedup >= 1, "speedup", self.speedup, "at least 1: slower is never kept")
        _demand(0.5 <= self.confidence < 1, "confidence", self.confidence, "at least 0.5 and below 1")
        _demand(self.rounds >= FEWEST_ROUNDS, "rounds", self.rounds, f"at least {FEWEST_ROUNDS}")
        for name in ("fewest_calls", "most_sets", "misses"):
            _demand(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def _demand(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise AccelerateError(f"gate '{name}' is {value!r}, expected {expected}")
