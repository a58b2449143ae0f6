"""The fidelity gate of a tier: the same observations and noise through float32 and through the tier."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...engine import exact_float32
from ...policies.pi05 import Pi05Policy
from ...policies.pi05.config import Pi05Config
from ...policies.pi05.settings import resolve
from ...precision.calibration import load_calibration
from ...precision.fidelity import Result, failures, record
from ...precision.tier import load_tier
from ..circumstances import machine, now, significant, versions
from ..errors import MeasureError
from ..parity import Distances, LayerErrors, cosine, distances
from ..tables import table
from .calibrate import describe
from .observations import Observation
from .official import Official
from .ours import Ours
from .result import kernel_reports, weight_figures
from .watched import wide_settings

Say = Callable[[str], None]
Observe = Callable[[Pi05Policy], Sequence[Observation]]
OWN, LEROBOT = "float32", "lerobot"
REFERENCES = (OWN, LEROBOT)
_NEGLIGIBLE = 0.01  # of the normalised range [-1, 1]: half a per cent of a joint's

PROTOCOL = (
    "The same checkpoint, raw images, tokens and noise through the reference in float32 without TF32 and through the "
    "tier as the robot would run it. Cosines over all padded action dimensions. Every named action must have a cosine "
    "of its own at the bar of the worst observation, or lie within "
    f"{_NEGLIGIBLE} of the reference everywhere. Layer errors: relative, 2-norm, of keys and values. With random "
    "weights all of this depends on how they were drawn (see `weights`)."
)


@dataclass(frozen=True)
class Decided:
    """What one model made of the observations: actions, and keys and values of every layer."""

    actions: list[np.ndarray]
    key_value: list[Tensor]


@dataclass(frozen=True)
class GatePlan:
    """What is gated.

    Attributes:
        settings: of the policy, with `precision` and `calibration`.
        reference: "float32" (our references, which `flashrt verify` compares with LeRobot) or "lerobot" itself.
        weights: how the weights came to be, for the record; agreement on random weights means little by itself.
    """

    settings: Mapping[str, Any]
    device: str
    reference: str
    weights: str


def run_gate(plan: GatePlan, observe: Observe, say: Say = lambda text: None) -> dict[str, Any]:
    """Compare, write the result beside the calibration, and return the report; `failures` is empty if it passed.

    Args:
        observe: makes the observations, for the policy of the tier.
    """
    settings = {**plan.settings, "unverified": True}
    ours = Ours.start(settings, plan.device)
    policy = ours.policy
    observations = observe(policy)
    say(f"{len(observations)} observations through {settings['precision']}")
    decided = _decided(ours, observations)
    kernels, size = kernel_reports(policy), weight_figures(policy.weights)
    ours.close()
    say(f"the same through {plan.reference}")
    report = compare(policy.config, _reference(plan, observations), decided, [item.noise for item in observations])
    calibration = Path(str(settings["calibration"])).expanduser()
    result = Result(
        report["cosine_global"],
        report["cosine_worst"],
        "LeRobot in float32" if plan.reference == LEROBOT else "float32",
        len(observations),
        load_tier(policy.config.precision).fidelity,
        tuple(report["failures"]),
    )
    report |= {
        "tier": policy.contract.identity.precision,
        "fingerprint": policy.contract.fingerprint,
        "reference": result.reference,
        "observations": len(observations),
        "weights": plan.weights,
        "weight_bytes": size,
        "kernels": kernels,
        "calibration": describe(load_calibration(calibration)),
        "device": plan.device,
        "date": now(),
        "machine": machine(),
        "versions": versions(),
        "protocol": PROTOCOL,
    }
    report["file"] = str(record(calibration, policy.contract.fingerprint, result, report))
    return report


def compare(config: Pi05Config, reference: Decided, decided: Decided, noise: Sequence[np.ndarray]) -> dict[str, Any]:
    """Figures of the tier against the reference, and what is below its bar."""
    exact, actions = np.stack(reference.actions), np.stack(decided.actions)
    whole = distances(actions, exact, np.stack(noise))
    bar = load_tier(config.precision).fidelity
    errors = LayerErrors()
    for own, theirs in zip(decided.key_value, reference.key_value, strict=True):
        errors.add(own, theirs)
    dims = _by_action(config, actions, exact)
    return {
        "failures": [
            *failures(whole.cosine_global, whole.cosine_worst, bar),
            *_dims_below(dims, bar.cosine_worst),
        ],
        "bar": {"cosine_global": bar.cosine_global, "cosine_worst": bar.cosine_worst},
        **_figures(whole),
        "actions": dims,
        "key_value": errors.to_list(),
    }


def _figures(whole: Distances) -> dict[str, Any]:
    values = whole.to_dict()
    del values["max_abs_per_dim"]
    return values


def _by_action(config: Pi05Config, actions: np.ndarray, exact: np.ndarray) -> dict[str, dict[str, float]]:
    """Cosine and largest difference of each named action, over all observations and steps of the chunk."""
    found: dict[str, dict[str, float]] = {}
    for name, column in zip(config.action_names, config.action_columns, strict=True):
        a, b = actions[:, :, column].astype(np.float64), exact[:, :, column].astype(np.float64)
        finite = bool(np.isfinite(a).all())
        found[name] = {
            "cosine": round(cosine(a, b), 9) if finite else -1.0,
            "max_abs": significant(float(np.abs(a - b).max())) if finite else float("inf"),
        }
    return found


def _dims_below(dims: Mapping[str, Mapping[str, float]], least: float) -> list[str]:
    return [
        f"action '{name}': cosine {values['cosine']:.6f} is below {least}, and it is off by {values['max_abs']:.3g}"
        for name, values in dims.items()
        if not (values["cosine"] >= least or values["max_abs"] <= _NEGLIGIBLE)
    ]


def _reference(plan: GatePlan, observations: Sequence[Observation]) -> Decided:
    with exact_float32():
        if plan.reference == LEROBOT:
            return _official(plan, observations)
        ours = Ours.start({**wide_settings(plan.settings), "dtype": "float32"}, plan.device)
        decided = _decided(ours, observations)
        ours.close()
        return decided


def _official(plan: GatePlan, observations: Sequence[Observation]) -> Decided:
    folder = plan.settings.get("checkpoint")
    if not folder:
        raise MeasureError("LeRobot needs a checkpoint to load; give --checkpoint, or use --reference float32")
    config = resolve(wide_settings(plan.settings)).config
    model = Official(Path(str(folder)), config, "float32", torch.device(plan.device))
    decided = Decided([], [])
    for observation in observations:
        actions, rows = model.decide_and_record(model.inputs(observation), config.steps)
        decided.actions.append(actions[0].float().cpu().numpy())
        decided.key_value.append(rows.cpu())
    return decided


def _decided(ours: Ours, observations: Sequence[Observation]) -> Decided:
    decided = Decided([], [])
    for observation in observations:
        decided.actions.append(ours.decide(observation))
        decided.key_value.append(ours.key_value().cpu())
    return decided


def summary(report: Mapping[str, Any]) -> str:
    """The report as tables, with the verdict last."""
    names = ("cosine_global", "cosine_worst", "cosine_flow")
    figures = [(report["tier"], *(f"{report[name]:.7f}" for name in names), report["relative_error"])]
    dims = [(name, f"{v['cosine']:.7f}", v["max_abs"]) for name, v in report["actions"].items()]
    layers = [(f"layer {i}", errors["key"], errors["value"]) for i, errors in enumerate(report["key_value"])]
    size = report["weight_bytes"]
    parts = [
        table((f"against {report['reference']}", "cosine", "worst", "of the flow", "relative error"), figures),
        table(("action", "cosine", "largest difference"), dims),
        table(("relative error", "keys", "values"), layers),
        f"weights: {size['stored'] / 1e6:.1f} MB, {size['ratio']} of 16 bits; drawn or trained: {report['weights']}",
        f"recorded in {report['file']}",
        "\n".join(f"BELOW THE BAR: {text}" for text in report["failures"]) or "passed",
    ]
    return "\n\n".join(parts)
