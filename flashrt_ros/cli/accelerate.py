"""`flashrt accelerate`: what can be faster in a PyTorch model that nobody prepared, and whether it may be."""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from .main import CommandError

if TYPE_CHECKING:
    from ..accelerate import Gates, Report
    from ..accelerate.sources import Source

NAME = "accelerate"
HELP = "find what can be faster in an unmodified PyTorch model, gate it, and write a receipt"
_BAR = 30
_REASON = 60  # characters of a reason in the table; all of it is in the receipt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the model, the gates and where the receipt goes."""
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--policy", metavar="lerobot:PATH", help="a LeRobot checkpoint folder")
    model.add_argument(
        "--module",
        metavar="PACKAGE:FACTORY",
        help="factory(device) that returns (model, examples) or (model, examples, method)",
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    parser.add_argument("--examples", type=int, default=3, help="random observations for --policy (default: 3)")
    parser.add_argument("--compile", action="store_true", help="also judge torch.compile; may take minutes")
    parser.add_argument("--cosine", type=float, help="global cosine that parity needs (default: 0.9999)")
    parser.add_argument("--speedup", type=float, help="speed-up that a candidate needs (default: 1.02)")
    parser.add_argument("--rounds", type=int, help="interleaved rounds of a comparison (default: 11)")
    parser.add_argument("--out", type=Path, help="write the receipt")
    parser.add_argument("--replay", type=Path, metavar="RECEIPT", help="activate a receipt instead of searching")


def run(args: argparse.Namespace) -> int:
    """Print the table; 1 if nothing was kept."""
    from ..accelerate import AccelerateError, accelerate, replay
    from ..accelerate.api import DEFAULT_KINDS
    from ..engine import EngineError

    try:
        source = _source(args)
        if args.replay:
            report = replay(source.model, args.replay, source.examples, method=source.method)
        else:
            kinds = (*DEFAULT_KINDS, "compile") if args.compile else DEFAULT_KINDS
            gates = _gates(args)
            report = accelerate(
                source.model, source.examples, method=source.method, gates=gates, kinds=kinds, progress=_progress
            )
    except (AccelerateError, EngineError) as error:
        raise CommandError(str(error)) from None
    with report:
        print(summary(report, source.about))
        if args.out:
            report.receipt.save(args.out)
            print(f"receipt: {args.out}")
        return 0 if report.kept else 1


def _source(args: argparse.Namespace) -> Source:
    from ..accelerate.sources import factory_model, lerobot_policy
    from ..engine import resolve_device

    device = resolve_device(args.device)
    if args.module:
        return factory_model(args.module, device)
    kind, separator, path = args.policy.partition(":")
    if kind != "lerobot" or not separator:
        raise CommandError(f"--policy {args.policy!r}: expected lerobot:PATH")
    return lerobot_policy(Path(path).expanduser(), device, args.examples)


def _gates(args: argparse.Namespace) -> Gates:
    from ..accelerate import Gates

    given = {"cosine_global": args.cosine, "speedup": args.speedup, "rounds": args.rounds}
    return Gates(**{name: value for name, value in given.items() if value is not None})


def _progress(done: int, total: int, text: str) -> None:
    """A bar on a terminal, a line a step elsewhere; on stderr, so that the table can be piped."""
    if sys.stderr.isatty():
        filled = _BAR * done // max(1, total)
        end = "\n" if text == "done" else ""
        print(f"\r[{'#' * filled}{' ' * (_BAR - filled)}] {text:<60.60}", end=end, file=sys.stderr, flush=True)
    else:
        print(f"accelerate: {done}/{total} {text}", file=sys.stderr, flush=True)


def summary(report: Report, about: str) -> str:
    """The candidates as a table, the kept set and the speed-up of the complete call."""
    from ..measure.tables import table

    rows = [(*row[:-1], textwrap.shorten(row[-1], _REASON, placeholder=" …")) for row in report.rows()]
    header = ("candidate", "sites", "cosine", "dimension", "speed-up", "verdict", "reason")
    latency = report.receipt.result["latency"]
    if latency is None:
        return f"{table(header, rows, about)}\n\nkept: nothing; the model is as it was"
    low, high = latency["interval"]
    times = f"{latency['baseline_ms']:.4g} ms to {latency['ms']:.4g} ms"
    gain = f"{latency['speedup']:.3f} times ({low:.3f} to {high:.3f})"
    guards = f"guards {100 * report.guard_ms / latency['ms']:.2g} % of it"
    return f"{table(header, rows, about)}\n\nkept: {', '.join(report.kept)}\ncomplete call: {times}, {gain}; {guards}"
