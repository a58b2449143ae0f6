"""`flashrt bench`: how fast, and against what."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .main import CommandError
from .measured import add_weights_arguments, cases, read_report, weights_settings

if TYPE_CHECKING:
    from ..measure.pi05.bench import Options

NAME = "bench"
HELP = "time a policy whole and in parts, beside its precision tiers, LeRobot and plain PyTorch in the same run"
_ALL = "lerobot_eager,lerobot_compiled,plain_graph,plain_compiled_layer_graph"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the policy, the configurations, the baselines and the protocol."""
    parser.add_argument("policy", choices=("pi05",), help="which policy")
    add_weights_arguments(parser)
    parser.add_argument(
        "--cases", type=cases, default=[(None, None)], metavar="VxC,…", help="views x chunk, such as 2x10,3x50"
    )
    parser.add_argument("--tokens", type=int, help="prompt tokens, exactly (default: the longest prompt)")
    parser.add_argument(
        "--tiers", type=_tiers, action="extend", default=[], metavar="TIER=FILE,…",
        help="time 16-bit and these tiers, each with its calibration, in the same rounds; for one case",
    )  # fmt: skip
    parser.add_argument("--baselines", default="none", help=f"none, all, or some of {_ALL} (default: none)")
    parser.add_argument(
        "--mechanisms", action="store_true", help="also time overlap, reuse and mapped windows, off and on"
    )
    parser.add_argument("--load", action="store_true", help="also time two starts, with kernels not cached and cached")
    parser.add_argument("--rounds", type=int, default=10, help="interleaved rounds (default: 10)")
    parser.add_argument("--calls", type=int, default=100, help="timed calls of a round, at most (default: 100)")
    parser.add_argument("--turn-seconds", type=float, default=1.0, help="of a slow candidate's turn (default: 1)")
    parser.add_argument(
        "--rate",
        type=_rate,
        metavar="HZ",
        help="also time 1000 calls and replays that begin at this rate, by turns, and 250 of each tier beside it",
    )
    parser.add_argument("--parity", type=Path, help="report of `flashrt verify` to put into the result")
    parser.add_argument("--out", type=Path, help="result file; objects of the same configurations are replaced")


def run(args: argparse.Namespace) -> int:
    """Measure every case, print tables, write the result file after each."""
    from ..engine import EngineError
    from ..measure.errors import MeasureError
    from ..measure.pi05.bench import bench_together
    from ..measure.pi05.observations import photographs
    from ..measure.pi05.subject import Case
    from ..policies import PolicyError
    from ..precision.errors import PrecisionError

    if args.tiers and len(args.cases) > 1:
        raise CommandError("--tiers goes with one case, because a calibration belongs to one; give one to --cases")
    results: list[dict[str, Any]] = []
    try:
        options, pictures, given = _options(args), photographs(args.images), weights_settings(args)
        for views, chunk in args.cases:
            with tempfile.TemporaryDirectory() as folder:
                settings = Case(views, chunk, args.tokens).settings(given, Path(folder) / "checkpoint")
                keep = partial(_keep, args.out, results)
                results += bench_together(_each(args, settings), options, pictures, _say, keep)
            options = replace(options, load=False)  # a start takes as long in every case
            _save(args.out, results)
    except (PolicyError, EngineError, MeasureError, PrecisionError) as error:
        raise CommandError(str(error)) from None
    print(summary(results))
    return 0


def _rate(text: str) -> float:
    """Calls a second."""
    try:
        hz = float(text)
    except ValueError:
        hz = 0.0
    if not 0 < hz <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is no rate; give calls a second, more than 0 and at most 1000")
    return hz


def _tiers(text: str) -> list[tuple[str, Path]]:
    """ "8-bit=a.safetensors,mine.yaml=b.safetensors" as (tier, calibration) pairs."""
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(tier and path for tier, _, path in pairs):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of tiers with their calibrations, such as 8-bit=8-bit.safetensors"
        )
    return [(tier, Path(path)) for tier, _, path in pairs]


def _each(args: argparse.Namespace, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Settings of every policy that is timed in the same rounds."""
    from ..measure.pi05.asked_tiers import AskedTier, tier_settings

    if not args.tiers:
        return [settings]
    asked = [AskedTier(tier, calibration) for tier, calibration in args.tiers]
    return tier_settings(settings, asked, args.device, twice=args.mechanisms)


def _options(args: argparse.Namespace) -> Options:
    from ..measure.pi05.baselines import BASELINES
    from ..measure.pi05.bench import Options
    from ..measure.rounds import Pace, Schedule

    names = {"none": (), "all": BASELINES}.get(args.baselines, tuple(args.baselines.split(",")))
    for name in names:
        if name not in BASELINES:
            raise CommandError(f"unknown baseline '{name}'; there are: {', '.join(BASELINES)}")
    parity: Mapping[str, Any] | None = read_report(args.parity) if args.parity else None
    schedule = Schedule(rounds=args.rounds, calls=args.calls, turn_s=args.turn_seconds)
    pace = Pace(args.rate) if args.rate else None
    return Options(args.device, schedule, names, args.mechanisms, parity, args.load, pace)


def _keep(path: Path | None, results: list[dict[str, Any]], more: list[dict[str, Any]]) -> None:
    _save(path, [*results, *more])


def _save(path: Path | None, results: list[dict[str, Any]]) -> None:
    from ..measure.pi05.result import merged

    if path is None:
        return
    old = read_report(path) if path.is_file() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(merged(old, results), indent=2) + "\n")


def summary(results: list[dict[str, Any]]) -> str:
    """The results as tables."""
    from ..measure.tables import table

    rows = [
        (_name(r), *r["replay_ms"].values(), *r["call_ms"].values(), *r["stage_ms"].values(), r["kernels"])
        for r in results
    ]
    header = ("ms", "replay p50", "p95", "p99", "call p50", "p95", "p99", "vision", "prefix", "expert", "kernels")
    parts = [table(header, rows)]
    if any(len(r["interleaved"]) > 1 for r in results):
        parts.append(_tier_table(results))
    for r in results:
        beside = [
            (name, ms, r["speedup"][name], r["baseline_kernels"][name], r["baseline_cosine"][name])
            for name, ms in r["baselines"].items()
        ]
        pairs = [(f"{name} off / on", off, off / on, None, None) for name, (off, on) in r["pairs"].items()]
        if beside or pairs:
            parts.append(table((_name(r), "ms", "times ours", "kernels", "cosine"), [*beside, *pairs]))
        parts += [f"{name} off / on: not timed, {reason}" for name, reason in r["pairs_missing"].items()]
        parts.append(table((_name(r), "µs"), list(r["call_parts_us"].items())))
        if r["at_rate"]:
            parts.append(_rate_text(r["at_rate"]))
        if r["load_s"]:
            parts.append(_load_text(r["load_s"]))
        if r["gpu"]:
            power, clock = r["gpu"].get("power_w", {}), r["gpu"].get("sm_mhz", {})
            parts.append(f"GPU: median {power.get('median')} W (max {power.get('max')}), {clock.get('median')} MHz")
    return "\n\n".join(parts)


def _rate_text(paced: Mapping[str, Any]) -> str:
    """What a robot sees that asks at a fixed rate."""
    from ..measure.tables import table

    rows = [(name, *paced[f"{name}_ms"].values(), paced["p99_over_p50"][name]) for name in ("replay", "call")]
    text = table((f"ms, at {paced['hz']:g} Hz", "p50", "p95", "p99", "p99 / p50"), rows)
    return f"{text}\n{paced['calls_timed']} of each, {paced['late']} late"


def _load_text(load: Mapping[str, Any]) -> str:
    """How long both starts took, and where the time went."""
    shown = ("first_action", "second_start", "second_start_with_imports")
    totals = ", ".join(f"{name} {load[name]} s" for name in shown)
    lines = [f"{name}: {_parts_text(load[name])}" for name in ("first_parts", "second_parts")]
    return "\n".join([totals, *lines])


def _parts_text(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{part} {seconds} s" for part, seconds in parts.items())


def _tier_table(results: list[dict[str, Any]]) -> str:
    """What each tier gains, takes and loses, and what it runs as."""
    from ..measure.tables import table

    rows = []
    for r in results:
        gain: Mapping[str, float] = next(iter(r["speedup_over"].values()), {})
        found = r["agreement"] or r["parity"] or {}
        cosines = [f"{found[name]:.7f}" if name in found else None for name in ("cosine_global", "cosine_worst")]
        size = r["weight_bytes"]
        rows.append(
            (r["tier"], r["replay_ms"]["p50"], gain.get("replay"), gain.get("call"), *cosines,
             found.get("relative_error"), size["stored"] / 1e6, size["ratio"])
        )  # fmt: skip
    header = ("tier", "replay ms", "times faster", "whole call", "cosine", "worst", "relative error", "weights MB",
              "of 16 bits")  # fmt: skip
    runs = [f"{r['tier']} runs as: {'; '.join(r['kernel_reports'])}" for r in results]
    missing = [r["tier"] for r in results if not (r["agreement"] or r["parity"])]
    remedy = "`flashrt verify` (16-bit: --parity) or `flashrt verify --tier`"
    unknown = [f"agreement not on record for {', '.join(missing)}: run {remedy}"] if missing else []
    return "\n".join([table(header, rows), *runs, *unknown])


def _name(r: Mapping[str, Any]) -> str:
    return f"{r['preset']} {r['device']} {r['views']} views, {r['tokens']} tokens, chunk {r['chunk']}, {r['tier']}"


def _say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)
