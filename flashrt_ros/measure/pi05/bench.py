"""Policies measured: ours whole and in parts, its kernels, its mechanisms, and the baselines beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch

from ...engine import memory_refusals, resolve_device
from ..circumstances import now
from ..errors import MeasureError
from ..gpu import GpuWatch
from ..parity import cosine
from ..rounds import Candidate, Pace, Samples, Schedule, measure, measure_at_rate
from ..trace import figures, traced
from .baselines import Baseline, Shared, baselines
from .mechanisms import FEW, Mechanisms, mechanisms
from .observations import Pixels
from .result import Run, Timed, at_rate, parity_summary, result_of, speedup_over, tier_name
from .starts import starts
from .subject import CALL_PARTS, Subject

Say = Callable[[str], None]
Keep = Callable[[list[dict[str, Any]]], None]
"""Takes results that something is missing of yet."""
_SAME = 0.99  # cosine below which a baseline computes something else


@dataclass(frozen=True)
class Options:
    """What is measured beside our own policy.

    Attributes:
        load: two starts, with the cache of kernels cold and warm.
        pace: every policy at a fixed rate too, after the rounds; all but the first with a quarter of the calls.
    """

    device: str = "cpu"
    schedule: Schedule = field(default_factory=Schedule)
    baselines: tuple[str, ...] = ()
    mechanisms: bool = False
    parity: Mapping[str, Any] | None = None
    load: bool = False
    pace: Pace | None = None


def bench(settings: Mapping[str, Any], options: Options, pictures: list[Pixels], say: Say) -> dict[str, Any]:
    """Measure one configuration; the result is one object of the result file."""
    (result,) = bench_together([settings], options, pictures, say)
    return result


def bench_together(
    each: Sequence[Mapping[str, Any]],
    options: Options,
    pictures: list[Pixels],
    say: Say,
    keep: Keep = lambda _: None,
) -> list[dict[str, Any]]:
    """Measure policies that differ in their precision, in the same interleaved rounds of one process.

    Args:
        each: settings of every policy. The first is what the others are compared with; baselines and parity are its.
        keep: called behind the rounds, which take minutes, with all but what is at a fixed rate and how many kernels:
            whoever ends the process then has not waited for nothing.

    Returns:
        One object of the result file for each.
    """
    device = resolve_device(options.device)
    load_s = [_starts(settings, options, say) for settings in each]
    with ExitStack() as stack, memory_refusals(device):
        timed = [_loaded(settings, options, pictures, stack, say) for settings in each]
        timed[0] = _with_rivals(timed[0], options, stack, say)
        candidates = _in_turns([_candidates(item) for item in timed])
        say(f"timing {len(candidates)} candidates in {options.schedule.rounds} rounds")
        with GpuWatch() as watch:
            samples = measure(candidates, options.schedule, device)
        run = Run(options.schedule.describe(), tuple(item.tier for item in timed), options.device, watch.seen(), now())

        def results(paced: Sequence[dict[str, Any] | None]) -> list[dict[str, Any]]:
            found = [result_of(item, _own_samples(item, samples), run) for item in timed]
            found[0]["parity"] = parity_summary(options.parity)
            for result, seconds, rate in zip(found, load_s, paced, strict=True):
                result |= {"load_s": seconds, "at_rate": rate}
            for result in found[1:]:
                result["speedup_over"] = speedup_over(found[0], result)
            return found

        timed = [replace(item, kernels=_not_counted(item)) for item in timed]
        keep(results([None] * len(timed)))
        paced = _all_at_rate(timed, options.pace, device, say)
        say("tracing kernels")
        timed = [replace(item, kernels=_kernels(item)) for item in timed]
        return results(paced)


def _starts(settings: Mapping[str, Any], options: Options, say: Say) -> dict[str, Any] | None:
    if not options.load:
        return None
    say(f"two starts in processes of their own{_of(settings)}")
    return starts(settings, options.device)


def _of(settings: Mapping[str, Any]) -> str:
    return f", {settings['precision']}" if "precision" in settings else ""


def _loaded(settings: Mapping[str, Any], options: Options, pictures: list[Pixels], stack: ExitStack, say: Say) -> Timed:
    """A policy with its session, and what its mechanisms need."""
    say(f"ours{_of(settings)}: load, capture")
    before = _held_bytes(options.device)
    subject = Subject(settings, options.device, pictures)
    stack.callback(subject.close)
    held, tier = _held_bytes(options.device) - before, tier_name(subject.policy.config)
    try:
        pairs = mechanisms(subject, pictures, stack) if options.mechanisms else Mechanisms()
    except MeasureError as error:
        raise MeasureError(f"{tier}: {error}") from None
    return Timed(tier, subject, pairs, held or None)


def _held_bytes(device: str) -> int:
    """Bytes of GPU memory that PyTorch has handed out; 0 on a CPU."""
    target = torch.device(device)
    return torch.cuda.memory_allocated(target) if target.type == "cuda" else 0


def _with_rivals(timed: Timed, options: Options, stack: ExitStack, say: Say) -> Timed:
    rivals = _rivals(timed.subject, options, stack, say)
    return replace(timed, rivals=rivals, similarity=_compared(timed.subject, rivals))


# -- candidates --------------------------------------------------------------------------------------------------------


def _candidates(timed: Timed) -> list[Candidate]:
    """All that is timed of one policy, under names that no other has."""
    ours = timed.subject
    own = [
        Candidate("call", ours.decide, on_host=True),
        Candidate("replay", ours.replay),
        ours.parts(),
        Candidate("call_parts", ours.decide_in_parts, on_host=True, laps=CALL_PARTS, calls=FEW),
        *timed.mechanisms.candidates,
        *(Candidate(rival.name, rival.run, calls=FEW) for rival in timed.rivals),
    ]
    return [replace(candidate, name=_prefix(timed) + candidate.name) for candidate in own]


def _all_at_rate(
    timed: Sequence[Timed], pace: Pace | None, device: torch.device, say: Say
) -> list[dict[str, Any] | None]:
    """Each policy by itself at the rate, the first with all of its calls, as their tail is of interest."""
    if pace is None:
        return [None] * len(timed)
    paces = pace, *[replace(pace, calls=-(-pace.calls // 4))] * (len(timed) - 1)
    return [_at_rate(item, each, device, say) for item, each in zip(timed, paces, strict=True)]


def _at_rate(timed: Timed, pace: Pace, device: torch.device, say: Say) -> dict[str, Any]:
    ours = timed.subject
    say(f"{timed.tier}: {pace.calls} calls and replays at {pace.hz:g} a second")
    candidates = Candidate("call", ours.decide, on_host=True), Candidate("replay", ours.replay)
    with GpuWatch() as watch:
        samples, late = measure_at_rate(candidates, pace, device)
    return at_rate(samples, pace, late, watch.seen())


def _in_turns(groups: Sequence[Sequence[Candidate]]) -> list[Candidate]:
    """The first of every group, then the second of every group: what is compared is timed side by side."""
    return [candidate for candidate in chain.from_iterable(zip_longest(*groups)) if candidate is not None]


def _own_samples(timed: Timed, samples: Mapping[str, Samples]) -> dict[str, Samples]:
    prefix = _prefix(timed)
    return {name.removeprefix(prefix): each for name, each in samples.items() if name.startswith(prefix)}


def _prefix(timed: Timed) -> str:
    return f"{timed.tier}\n"  # no tier's name is the beginning of another one with it


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


def _not_counted(timed: Timed) -> dict[str, int | None]:
    return dict.fromkeys(("ours", *(rival.name for rival in timed.rivals)))


def _kernels(timed: Timed) -> dict[str, int | None]:
    """Kernels of a decision, ours and each baseline's; None where there is no GPU to count on."""
    ours, rivals = timed.subject, timed.rivals
    device = ours.runner.session.device
    if device.type != "cuda":
        return _not_counted(timed)
    counts: dict[str, int | None] = {"ours": figures(ours.trace()).kernels}
    return counts | {rival.name: figures(traced(rival.run, device)).kernels for rival in rivals}
