"""`flashrt roofline`: the least time that the hardware allows, and the share of it that was reached."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .main import CommandError
from .measured import read_report

if TYPE_CHECKING:
    from ..measure.devices import Device
    from ..measure.roofline import Floor, Work

NAME = "roofline"
HELP = "operations and bytes of each stage against a device's ceilings; predictions for devices we have not measured"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the configuration, the device, and measured times to compare with."""
    parser.add_argument("--device", default="all", help="h200, thor, rtx5090, orin or all (default: all)")
    parser.add_argument("--views", type=int, default=2, help="cameras (default: 2)")
    parser.add_argument("--chunk", type=int, default=10, help="actions in a chunk (default: 10)")
    parser.add_argument("--tokens", type=int, default=200, help="prompt tokens (default: 200)")
    parser.add_argument("--steps", type=int, default=10, help="Euler steps (default: 10)")
    parser.add_argument("--measured", type=Path, help="result file of `flashrt bench` on a measured device")
    parser.add_argument("--out", type=Path, help="write everything as JSON")


def run(args: argparse.Namespace) -> int:
    """Print one table a device."""
    from ..measure.devices import DEVICES, device_of
    from ..measure.errors import MeasureError
    from ..policies import PolicyError

    try:
        devices = list(DEVICES.values()) if args.device == "all" else [device_of(args.device)]
        work = _work(args)
        reached = _reached(args, work)
    except (MeasureError, PolicyError) as error:
        raise CommandError(str(error)) from None
    report = _report(work, devices, reached)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=2) + "\n")
    print(summary(report))
    return 0


def _work(args: argparse.Namespace) -> dict[str, Work]:
    """The contract of the true size, and what its stages must do."""
    from ..contract import Identity
    from ..measure.pi05.workload import workload
    from ..policies.pi05.config import Pi05Config
    from ..policies.pi05.plan import build_contract

    config = Pi05Config(
        views=tuple(f"view_{i}" for i in range(args.views)), state_names=("state",), action_names=("action",),
        chunk=args.chunk, prompt_buckets=(args.tokens,), steps=args.steps,
    )  # fmt: skip
    contract = build_contract(config, Identity(policy="pi05", weights="none"))
    return workload(config, contract, contract.variants[0])


def _reached(args: argparse.Namespace, work: Mapping[str, Work]) -> dict[str, dict[str, float]]:
    """Tier → stage → share of the measured device's ceiling, from the fastest result of the same configuration."""
    from ..measure.devices import device_named
    from ..measure.roofline import counted_as, floors, fractions

    if args.measured is None:
        return {}
    found: dict[str, dict[str, float]] = {}
    for result in sorted(read_report(args.measured), key=_decision_ms, reverse=True):
        device = device_named(str(result["machine"].get("gpu")))
        same = (result["views"], result["chunk"], result["tokens"]) == (args.views, args.chunk, args.tokens)
        counted = counted_as(result["tier"], device) if device is not None and device.measured and same else None
        if device is not None and counted is not None:
            found[counted] = fractions(result["stage_ms"], floors(work, device, counted))
    if not found:
        raise CommandError(
            f"{args.measured} has no result of {args.views} views, chunk {args.chunk}, {args.tokens} tokens on a "
            "device whose ceilings we measured"
        )
    return found


def _decision_ms(result: Mapping[str, Any]) -> float:
    """Of all its stages."""
    return float(sum(result["stage_ms"].values()))


def _report(
    work: Mapping[str, Work], devices: list[Device], reached: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    from dataclasses import asdict

    from ..measure.roofline import TIERS, floors

    def tier(device: Device, name: str) -> dict[str, Any]:
        shares = reached.get(name) or reached.get("16-bit") or {}
        stages = {stage: _stage(floor, shares.get(stage)) for stage, floor in floors(work, device, name).items()}
        times = [stage["at_the_reached_share_ms"] for stage in stages.values()]
        return {
            "stages": stages,
            "floor_ms": round(sum(stage["floor_ms"] for stage in stages.values()), 3),
            "at_the_reached_share_ms": round(sum(times), 3) if None not in times else None,
        }

    return {
        "work": {stage: asdict(each) for stage, each in work.items()},
        "devices": {
            device.name: {
                "label": "measured ceilings" if device.measured else "PREDICTED from a data sheet",
                "source": device.source,
                "tiers": {name: tier(device, name) for name in TIERS},
            }
            for device in devices
        },
        "reached": {name: dict(shares) for name, shares in reached.items()},
    }


def _stage(floor: Floor, share: float | None) -> dict[str, Any]:
    return {
        "compute_ms": round(floor.compute_ms, 3),
        "memory_ms": round(floor.memory_ms, 3),
        "floor_ms": round(floor.ms, 3),
        "bound": floor.bound,
        "format": floor.format,
        "share": share,
        "at_the_reached_share_ms": round(floor.ms / share, 3) if share else None,
    }


def summary(report: Mapping[str, Any]) -> str:
    """One table of the work, one a device."""
    from ..measure.tables import table

    rows = [(n, w["operations"] / 1e12, w["weights"] / 1e6, w["bytes"] / 1e6) for n, w in report["work"].items()]
    parts = [table(("stage", "TFLOP", "M weights read", "other MB"), rows)]
    for name, device in report["devices"].items():
        lines = []
        for tier, figures in device["tiers"].items():
            lines += [
                (f"{tier} {stage}", s["format"], s["compute_ms"], s["memory_ms"], s["floor_ms"], s["bound"], s["share"],
                 s["at_the_reached_share_ms"])
                for stage, s in figures["stages"].items()
            ]  # fmt: skip
            total = figures["at_the_reached_share_ms"]
            lines.append((f"{tier} decision", "", None, None, figures["floor_ms"], "", None, total))
        header = ("ms", "format", "compute", "memory", "floor", "bound", "share reached", "at that share")
        parts.append(table(header, lines, title=f"{name}: {device['label']} ({device['source']})"))
    return "\n\n".join(parts)
