"""The fidelity gate: a tier starts only where it was measured to act like float32, and the measurement is on record.

Results stand beside the calibration, in `<calibration>.fidelity.json`, one for each fingerprint. A fingerprint holds
architecture and kernels, so a kernel that was changed, or another GPU, has to pass again.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .errors import FidelityError
from .tier import Fidelity

NOT_GATED = "16-bit, nothing to pass"
_AGAIN = "remove it and run `flashrt verify --tier` again"


@dataclass(frozen=True)
class Result:
    """One measurement.

    Attributes:
        cosine_global, cosine_worst: of all actions together, and the smallest of one observation.
        reference: what was compared with.
        observations: how many.
        bar: what the tier demands.
        failures: why it did not pass, one sentence each; empty if it did.
    """

    cosine_global: float
    cosine_worst: float
    reference: str
    observations: int
    bar: Fidelity
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing failed, judged again from the figures."""
        return not self.failures and not failures(self.cosine_global, self.cosine_worst, self.bar)

    def __str__(self) -> str:
        figures = f"cosine {self.cosine_global:.6f}, worst {self.cosine_worst:.6f} of {self.observations} observations"
        return f"{'passed' if self.passed else 'FAILED'}: {figures} against {self.reference}"


def failures(cosine_global: float, cosine_worst: float, bar: Fidelity) -> list[str]:
    """What is below the bar; a figure that is not a number fails."""
    figures = (
        ("global cosine", cosine_global, bar.cosine_global),
        ("worst cosine", cosine_worst, bar.cosine_worst),
    )
    return [f"{name} {value:.6f} is below {least}" for name, value, least in figures if not value >= least]


def fidelity_file(calibration: Path) -> Path:
    """Where results for this calibration stand."""
    return calibration.with_name(calibration.name + ".fidelity.json")


def record(calibration: Path, fingerprint: str, result: Result, report: Mapping[str, Any]) -> Path:
    """Write the result of one fingerprint with its whole report, beside those of others; the path is returned.

    Raises FidelityError if the file cannot be written, or holds something else.
    """
    path = fidelity_file(calibration)
    results = _read(path) if path.exists() else {}
    results[fingerprint] = {"result": asdict(result), "report": dict(report)}
    temporary = path.with_name(path.name + ".part")
    try:
        temporary.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise FidelityError(f"cannot write '{path}': {error.strerror}") from None
    return path


def recorded(calibration: Path, fingerprint: str) -> Result | None:
    """The result for `fingerprint`, or None if there is none; FidelityError if the file is damaged."""
    path = fidelity_file(calibration)
    entry = _read(path).get(fingerprint) if path.exists() else None
    if entry is None:
        return None
    try:
        values = entry["result"]
        result = Result(**{**values, "bar": Fidelity(**values["bar"]), "failures": tuple(values["failures"])})
        finite = math.isfinite(result.cosine_global) and math.isfinite(result.cosine_worst)
    except (KeyError, TypeError) as error:
        raise FidelityError(
            f"'{path}' is malformed ({error}); remove it and run `flashrt verify --tier` again"
        ) from None
    if not finite:
        raise FidelityError(f"'{path}' holds a cosine that is no number; {_AGAIN}")
    return result


def recorded_report(calibration: Path, fingerprint: str) -> Mapping[str, Any]:
    """The whole report behind `recorded`'s result; FidelityError if there is none."""
    try:
        return dict(_read(fidelity_file(calibration))[fingerprint]["report"])
    except (KeyError, TypeError, ValueError):
        raise FidelityError(f"'{fidelity_file(calibration)}' has no report of {fingerprint[:16]}; {_AGAIN}") from None


def require(calibration: Path, fingerprint: str, tier: str, bar: Fidelity) -> Result:
    """The result that lets a tier start; FidelityError, with the remedy, if there is none, or it failed.

    Args:
        bar: of the tier as it is now; a result that was measured against a lower one does not count.
    """
    result = recorded(calibration, fingerprint)
    remedy = "run `flashrt verify --tier` on this machine with this checkpoint and these settings"
    if result is None:
        raise FidelityError(
            f"tier '{tier}' has not passed its fidelity gate for contract {fingerprint[:16]} "
            f"('{fidelity_file(calibration)}'); {remedy}"
        )
    below = [*result.failures, *failures(result.cosine_global, result.cosine_worst, bar)]
    if below:
        raise FidelityError(f"tier '{tier}' failed its fidelity gate: {below[0]}; use a wider tier, or calibrate again")
    return result


def _read(path: Path) -> dict[str, Any]:
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FidelityError(
            f"cannot read '{path}' ({error}); remove it and run `flashrt verify --tier` again"
        ) from None
    if not isinstance(results, dict):
        raise FidelityError(f"'{path}' holds no results; {_AGAIN}")
    return results
