"""One configuration measured: ours whole and in parts, its kernels, its mechanisms, and the baselines beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...engine.windows import WindowPath
from ...policies.pi05.config import Pi05Config
from ...precision.tier import load_tier
from ..circumstances import machine, now, percentiles, significant, versions
from ..devices import device_named
from ..errors import MeasureError
from ..gpu import GpuWatch
from ..parity import cosine
from ..roofline import TIERS as ROOFLINE_TIERS
from ..roofline import floors, fractions
from ..rounds import Candidate, Samples, Schedule, measure
from ..trace import figures, traced
from .baselines import Baseline, Shared, baselines
from .observations import Pixels
from .starts import starts
from .subject import CALL_PARTS, PARTS, Subject
from .workload import workload

Say = Callable[[str], None]
TIERS = {"bfloat16": "16-bit", "float32": "32-bit"}
_FEW = 10  # calls of a turn for what only a median is reported of
_SAME = 0.99  # cosine below which a baseline computes something else
_OVERLAP = "overlap"  # the policy's setting that switches launch overlap, where it has one

PROTOCOL = (
    "Ours, 'call': camera bytes on the host to actions on the host, by the host's clock; 'call_parts_us': parts of it, "
    "in calls that wait for the device after uploads and after replay; 'replay': the graphs of one decision with an "
    "unchanged instruction, between device events. Stages: the same bodies, each as its own graph. "
    "Baselines start from images that are resized and normalised on the device already, and end with actions on the "
    "device. All run on the same weights, tokens and noise, and their actions are compared with ours."
)


_MAPPED = "mapped_windows"
_OTHER_WINDOWS = {WindowPath.PINNED: WindowPath.MAPPED, WindowPath.MAPPED: WindowPath.PINNED}


@dataclass(frozen=True)
class Options:
    """What is measured beside our own policy; `load`: two starts, with the cache of kernels cold and warm."""

    device: str = "cpu"
    schedule: Schedule = field(default_factory=Schedule)
    baselines: tuple[str, ...] = ()
    mechanisms: bool = False
    parity: Mapping[str, Any] | None = None
    load: bool = False


def bench(settings: Mapping[str, Any], options: Options, pictures: list[Pixels], say: Say) -> dict[str, Any]:
    """Measure one configuration; the result is one object of the result file."""
    load_s = None
    if options.load:
        say("two starts in processes of their own")
        load_s = starts(settings, options.device)
    with ExitStack() as stack:
        say("ours: load, capture")
        ours = Subject(settings, options.device, pictures)
        stack.callback(ours.close)
        candidates = [
            Candidate("call", ours.decide, on_host=True),
            Candidate("replay", ours.replay),
            ours.parts(),
            Candidate("call_parts", ours.decide_in_parts, on_host=True, laps=CALL_PARTS, calls=_FEW),
        ]
        mechanisms = _mechanisms(ours, options, pictures, stack) if options.mechanisms else _Mechanisms([], {}, {})
        rivals = _rivals(ours, options, stack, say)
        similarity = _compared(ours, rivals)
        candidates += [*mechanisms.candidates, *(Candidate(rival.name, rival.run, calls=_FEW) for rival in rivals)]
        say(f"timing {len(candidates)} candidates in {options.schedule.rounds} rounds")
        device = ours.runner.session.device
        with GpuWatch() as watch:
            samples = measure(candidates, options.schedule, device)
        say("tracing kernels")
        traces = _kernels(ours, rivals, device)
    return _result(ours, options, samples, mechanisms, rivals, similarity, traces, watch.seen()) | {"load_s": load_s}


# -- candidates --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Mechanisms:
    """On/off pairs: candidates to time, (off, on) names by mechanism, and reasons for pairs that cannot be timed."""

    candidates: Sequence[Candidate]
    pairs: Mapping[str, tuple[str, str]]
    missing: Mapping[str, str]


def _mechanisms(ours: Subject, options: Options, pictures: list[Pixels], stack: ExitStack) -> _Mechanisms:
    """The pairs of every mechanism; both sides of a pair must give equal bits."""
    reuse = _reuse_pair(ours)
    others = [_overlap_pair(ours, options, pictures, stack), _windows_pair(ours, options, pictures, stack)]
    return _Mechanisms(
        [*reuse.candidates, *(candidate for other in others for candidate in other.candidates)],
        {**reuse.pairs, **{name: pair for other in others for name, pair in other.pairs.items()}},
        {name: reason for other in others for name, reason in other.missing.items()},
    )


def _reuse_pair(ours: Subject) -> _Mechanisms:
    """With and without replaying checkpoint and prompt stages in every decision."""
    _require_equal_bits("reuse", _after(ours, ours.rebuild), _after(ours, ours.replay))
    return _Mechanisms([Candidate("reuse_off", ours.rebuild, calls=_FEW)], {"reuse": ("reuse_off", "replay")}, {})


def _overlap_pair(ours: Subject, options: Options, pictures: list[Pixels], stack: ExitStack) -> _Mechanisms:
    """Two policies that differ in the setting of launch overlap."""
    if _OVERLAP not in {each.name for each in fields(Pi05Config)}:
        return _Mechanisms([], {}, {_OVERLAP: f"the policy has no setting '{_OVERLAP}'"})
    other = Subject({**ours.settings, _OVERLAP: not getattr(ours.policy.config, _OVERLAP)}, options.device, pictures)
    _require_equal(_OVERLAP, ours, other, stack)
    names = ("replay", "other_overlap") if not getattr(ours.policy.config, _OVERLAP) else ("other_overlap", "replay")
    return _Mechanisms([Candidate("other_overlap", other.replay)], {_OVERLAP: names}, {})


def _windows_pair(ours: Subject, options: Options, pictures: list[Pixels], stack: ExitStack) -> _Mechanisms:
    """Whole calls of two sessions of one policy: windows that are uploaded, and windows that the GPU reads in place."""
    if ours.windows not in _OTHER_WINDOWS:
        return _Mechanisms([], {}, {_MAPPED: f"windows are {ours.windows} memory on '{options.device}'"})
    path = _OTHER_WINDOWS[WindowPath(ours.windows)]
    other = Subject(ours.settings, options.device, pictures, policy=ours.policy, windows=path)
    _require_equal(_MAPPED, ours, other, stack)
    names = ("call", "other_windows") if path is WindowPath.MAPPED else ("other_windows", "call")
    return _Mechanisms([Candidate("other_windows", other.decide, on_host=True)], {_MAPPED: names}, {})


def _require_equal(mechanism: str, ours: Subject, other: Subject, stack: ExitStack) -> None:
    stack.callback(other.close)
    other.runner.session.fill("noise", ours.runner.session.read("noise"))
    _require_equal_bits(mechanism, _after(ours, ours.replay), _after(other, other.replay))


def _after(subject: Subject, call: Callable[[], object]) -> np.ndarray:
    call()
    return subject.actions()


def _require_equal_bits(mechanism: str, off: np.ndarray, on: np.ndarray) -> None:
    if not np.array_equal(off, on):
        worst = float(np.abs(off - on).max())
        raise MeasureError(f"'{mechanism}' off and on differ by up to {worst:.3g}; both must give equal bits")


def _rivals(ours: Subject, options: Options, stack: ExitStack, say: Say) -> list[Baseline]:
    if not options.baselines:
        return []
    say(f"baselines: {', '.join(options.baselines)}")
    checkpoint = ours.policy.checkpoint
    folder = None if checkpoint.startswith("preset:") else Path(checkpoint)
    shared = Shared(ours.policy.config, folder, ours.runner.session.device, ours.observation())
    return stack.enter_context(baselines(options.baselines, shared))


def _compared(ours: Subject, rivals: Sequence[Baseline]) -> dict[str, float]:
    """Cosine of each baseline's flow with ours; MeasureError if it computes something else."""
    ours.replay()
    noise = ours.observation().noise
    own, found = ours.actions() - noise, {}
    for rival in rivals:
        rival.run()
        found[rival.name] = round(cosine(rival.actions() - noise, own), 6)
        if not found[rival.name] >= _SAME:
            raise MeasureError(
                f"baseline '{rival.name}' computes something else (cosine {found[rival.name]} with ours); "
                "its time means nothing"
            )
    return found


def _kernels(ours: Subject, rivals: Sequence[Baseline], device: torch.device) -> dict[str, int | None]:
    """Kernels of a decision, ours and each baseline's; None where there is no GPU to count on."""
    if device.type != "cuda":
        return dict.fromkeys(("ours", *(rival.name for rival in rivals)))
    counts: dict[str, int | None] = {"ours": figures(ours.trace()).kernels}
    return counts | {rival.name: figures(traced(rival.run, device)).kernels for rival in rivals}


# -- result ------------------------------------------------------------------------------------------------------------


def _result(
    ours: Subject, options: Options, samples: Mapping[str, Samples], mechanisms: _Mechanisms,
    rivals: Sequence[Baseline], similarity: Mapping[str, float], kernels: Mapping[str, int | None],
    seen: Mapping[str, Any] | None,
) -> dict[str, Any]:  # fmt: skip
    config = ours.policy.config
    p50 = {name: significant(float(np.median(sample.total))) for name, sample in samples.items()}
    stage_ms = {part: significant(float(np.median(samples["parts"].laps[part]))) for part in PARTS}
    replay, call = samples["replay"].total, samples["call"].total
    precision = load_tier(config.precision)
    tier = TIERS[config.dtype] if precision.wide else precision.name
    return {
        "views": len(config.views),
        "tokens": ours.tokens,
        "chunk": config.chunk,
        "tier": tier,
        "device": options.device,
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
        "baselines": {rival.name: p50[rival.name] for rival in rivals},
        "baseline_kernels": {rival.name: kernels[rival.name] for rival in rivals},
        "baseline_cosine": dict(similarity),
        "speedup": {rival.name: significant(p50[rival.name] / p50["replay"]) for rival in rivals},
        "pairs": {name: [p50[off], p50[on]] for name, (off, on) in mechanisms.pairs.items()},
        "pairs_missing": dict(mechanisms.missing),
        "parity": parity_summary(options.parity),
        "roofline": _roofline(ours, tier, stage_ms),
        "active_kernels": ours.policy.contract.identity.kernels,
        "fingerprint": ours.policy.contract.fingerprint,
        "gpu": seen,
        "date": now(),
        "machine": machine(),
        "versions": versions(),
        "protocol": f"{PROTOCOL} {options.schedule.describe()}",
    }


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
    if device is None or not device.measured or tier not in ROOFLINE_TIERS:
        return None
    contract = ours.policy.contract
    work = workload(ours.policy.config, contract, contract.variant(ours.runner.session.variant))
    return fractions(stage_ms, floors(work, device, tier))


def same_case(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two results are of one configuration, so that the newer one takes the older one's place."""
    keys = ("views", "tokens", "chunk", "tier", "device", "preset", "plan")
    return all(one.get(key) == other.get(key) for key in keys)


def merged(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`old` with the results of `new` in the place of those of the same configuration, or behind."""
    kept = [dict(result) for result in old if not any(same_case(result, other) for other in new)]
    return [*kept, *(dict(result) for result in new)]
