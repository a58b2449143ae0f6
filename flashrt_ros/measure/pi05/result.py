"""What the result file says of one policy that was timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...policies.pi05 import Pi05Policy
from ...policies.pi05.config import Pi05Config
from ...policies.pi05.tiers import weight_bytes
from ...policies.pi05.weights import Pi05Weights
from ...precision.fidelity import recorded, recorded_report
from ...precision.tier import load_tier
from ..circumstances import machine, percentiles, significant, versions
from ..devices import device_named
from ..roofline import counted_as, floors, fractions
from ..rounds import Pace, Samples
from .baselines import Baseline
from .mechanisms import Mechanisms
from .subject import PARTS, Subject
from .workload import workload

WIDE = {"bfloat16": "16-bit", "float32": "32-bit"}
"""Tier of a policy whose precision narrows nothing, by its dtype."""

PROTOCOL = (
    "Ours, 'call': camera bytes on the host to actions on the host, by the host's clock; 'call_parts_us': parts of it, "
    "in calls that wait for the device after uploads and after replay; 'replay': the graphs of one decision with an "
    "unchanged instruction, between device events. Stages: the same bodies, each as its own graph. "
    "Baselines start from images that are resized and normalised on the device already, and end with actions on the "
    "device. All run on the same weights, tokens and noise, and their actions are compared with ours. Tiers that were "
    "timed in the same rounds are 'interleaved'; 'agreement' is what a tier's fidelity gate recorded for this contract."
)


@dataclass(frozen=True)
class Timed:
    """One of our policies under measurement, with all that is timed of it.

    Attributes:
        held_bytes: GPU memory that policy and session hold after their first decision; None on a CPU.
        rivals, similarity: baselines beside it, and the cosine of each one's flow with ours.
        kernels: of a decision, by baseline and for "ours"; None where there is no GPU to count on.
    """

    tier: str
    subject: Subject
    mechanisms: Mechanisms
    held_bytes: int | None
    rivals: Sequence[Baseline] = ()
    similarity: Mapping[str, float] = field(default_factory=dict)
    kernels: Mapping[str, int | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """What all policies of one run share: schedule in words, their tiers, device, what the GPU did, and when."""

    schedule: str
    tiers: tuple[str, ...]
    device: str
    gpu: Mapping[str, Any] | None
    date: str


def tier_name(config: Pi05Config) -> str:
    """What the result file calls the precision of `config`."""
    precision = load_tier(config.precision)
    return WIDE[config.dtype] if precision.wide else precision.name


def result_of(timed: Timed, samples: Mapping[str, Samples], run: Run) -> dict[str, Any]:
    """The object of one policy; `samples` by the names of its own candidates."""
    ours, kernels = timed.subject, timed.kernels
    policy = ours.policy
    config = policy.config
    p50 = {name: significant(float(np.median(sample.total))) for name, sample in samples.items()}
    stage_ms = {part: significant(float(np.median(samples["parts"].laps[part]))) for part in PARTS}
    replay, call = samples["replay"].total, samples["call"].total
    return {
        "views": len(config.views),
        "tokens": ours.tokens,
        "chunk": config.chunk,
        "tier": timed.tier,
        "device": run.device,
        "preset": config.preset,
        "plan": config.plan,
        "replay_ms": percentiles(replay),
        "call_ms": percentiles(call),
        "p99_over_p50": {"replay": _spread(replay), "call": _spread(call)},
        "calls_timed": {name: len(sample.total) for name, sample in samples.items()},
        "stage_ms": stage_ms,
        "call_parts_us": _microseconds(samples["call_parts"]),
        "windows": ours.windows,
        "first_action_s": significant(ours.first_action_s, 3),
        "kernels": kernels["ours"],
        "baselines": {rival.name: p50[rival.name] for rival in timed.rivals},
        "baseline_kernels": {rival.name: kernels[rival.name] for rival in timed.rivals},
        "baseline_cosine": dict(timed.similarity),
        "speedup": {rival.name: significant(p50[rival.name] / p50["replay"]) for rival in timed.rivals},
        "interleaved": list(run.tiers),
        "speedup_over": {},
        "agreement": agreement(policy),
        "weight_bytes": weight_figures(policy.weights),
        "held_bytes": timed.held_bytes,
        "kernel_reports": kernel_reports(policy),
        "pairs": {name: [p50[off], p50[on]] for name, (off, on) in timed.mechanisms.pairs.items()},
        "pairs_missing": dict(timed.mechanisms.missing),
        "parity": None,
        "roofline": _roofline(ours, timed.tier, stage_ms),
        "active_kernels": policy.contract.identity.kernels,
        "fingerprint": policy.contract.fingerprint,
        "gpu": run.gpu,
        "date": run.date,
        "machine": machine(),
        "versions": versions(),
        "protocol": f"{PROTOCOL} {run.schedule}",
        "load_s": None,
        "at_rate": None,
    }


def at_rate(samples: Mapping[str, Samples], pace: Pace, late: int, gpu: Mapping[str, Any] | None) -> dict[str, Any]:
    """What calls and replays take that begin at a fixed rate, and what the GPU did meanwhile."""
    replay, call = samples["replay"].total, samples["call"].total
    return {
        "hz": pace.hz,
        "calls_timed": len(call),
        "late": late,
        "replay_ms": percentiles(replay),
        "call_ms": percentiles(call),
        "p99_over_p50": {"replay": _spread(replay), "call": _spread(call)},
        "gpu": gpu,
        "protocol": pace.describe(),
    }


def speedup_over(wide: Mapping[str, Any], tier: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """How many times faster `tier` is than `wide`, a result of the same run: p50 of replay and call, and each stage."""
    times = {"replay": ("replay_ms", "p50"), "call": ("call_ms", "p50"), **{part: ("stage_ms", part) for part in PARTS}}
    return {wide["tier"]: {name: significant(wide[a][b] / tier[a][b], 3) for name, (a, b) in times.items()}}


def agreement(policy: Pi05Policy) -> dict[str, Any] | None:
    """What the fidelity gate recorded for the very contract of `policy`; None if it was never gated or is 16-bit."""
    config, fingerprint = policy.config, policy.contract.fingerprint
    calibration = Path(config.calibration).expanduser()
    found = recorded(calibration, fingerprint) if config.calibration else None
    if found is None:
        return None
    report = recorded_report(calibration, fingerprint)
    return {
        "cosine_global": found.cosine_global,
        "cosine_worst": found.cosine_worst,
        "relative_error": report.get("relative_error"),
        "passed": found.passed,
        "bar": {"cosine_global": found.bar.cosine_global, "cosine_worst": found.bar.cosine_worst},
        "reference": found.reference,
        "observations": found.observations,
        "weights": report.get("weights"),
    }


def weight_figures(weights: Pi05Weights) -> dict[str, float]:
    """Bytes that `weights` take and would take in 16 bits, and their ratio."""
    size = weight_bytes(weights)
    return {"stored": size.stored, "in_16_bits": size.wide, "ratio": significant(size.ratio)}


def kernel_reports(policy: Pi05Policy) -> list[str]:
    """What runs how, one line for each part or kind of site."""
    return [str(item) for item in policy.kernel_reports] or ["all: reference"]


def _microseconds(sample: Samples) -> dict[str, float]:
    """Median of each lap."""
    return {name: significant(float(np.median(times)) * 1e3, 3) for name, times in sample.laps.items()}


def _spread(times: Sequence[float]) -> float:
    return round(float(np.percentile(times, 99) / np.percentile(times, 50)), 4)


def parity_summary(report: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What the result file keeps of a `flashrt verify` report: its largest number of steps."""
    if report is None:
        return None
    last = report["steps"][max(report["steps"], key=int)]
    own, official = last["ours"], last["official bfloat16"]
    return {
        "cosine_global": own["cosine_global"],
        "cosine_worst": own["cosine_worst"],
        "max_abs_per_dim": own["max_abs_per_dim"],
        "relative_error": own["relative_error"],
        "official_bf16_cosine_global": official["cosine_global"],
        "official_bf16_relative_error": official["relative_error"],
        "observations": report["observations"],
        "failures": report["failures"],
    }


def _roofline(ours: Subject, tier: str, stage_ms: Mapping[str, float]) -> dict[str, float] | None:
    """Share of the device's ceilings that each stage reaches; None for a device whose ceilings are not known."""
    on_gpu = ours.runner.session.device.type == "cuda"
    device = device_named(str(machine().get("gpu"))) if on_gpu else None
    counted = None if device is None or not device.measured else counted_as(tier, device)
    if device is None or counted is None:
        return None
    contract = ours.policy.contract
    work = workload(ours.policy.config, contract, contract.variant(ours.runner.session.variant))
    return fractions(stage_ms, floors(work, device, counted))


def same_case(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two results are of one configuration, so that the newer one takes the older one's place."""
    keys = ("views", "tokens", "chunk", "tier", "device", "preset", "plan")
    return all(one.get(key) == other.get(key) for key in keys)


def merged(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`old` with the results of `new` in the place of those of the same configuration, or behind.

    How long starts took is kept from the older result where the newer one did not time them; it has a date of its own.
    """
    kept = [next((_with_load(newer, older) for newer in new if same_case(newer, older)), older) for older in old]
    behind = [newer for newer in new if not any(same_case(newer, older) for older in old)]
    return [dict(result) for result in (*kept, *behind)]


def _with_load(newer: Mapping[str, Any], older: Mapping[str, Any]) -> Mapping[str, Any]:
    return newer if newer.get("load_s") else {**newer, "load_s": older.get("load_s")}
