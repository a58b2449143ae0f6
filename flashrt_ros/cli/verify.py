"""`flashrt verify`: is our policy the official one, and does a precision tier still act like it?"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .looked_at import add_observation_arguments, read_observations
from .main import CommandError
from .measured import add_case_arguments, add_weights_arguments, case_settings, counts, weights_settings

NAME = "verify"
HELP = "compare actions, keys and values with LeRobot's own implementation, or a tier's with float32 (--tier)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the checkpoint, what is compared, and where the report goes."""
    add_weights_arguments(parser)
    add_observation_arguments(parser)
    parser.add_argument("--views", type=counts, default=(1, 2, 3), metavar="N,N", help="cameras (default: 1,2,3)")
    parser.add_argument("--steps", type=counts, default=(1, 2, 10), metavar="N,N", help="default: 1,2,10")
    parser.add_argument("--out", type=Path, help="write the whole report as JSON")
    tier = parser.add_argument_group("the fidelity gate of a tier")
    add_case_arguments(tier)
    tier.add_argument("--tier", help="a preset, such as 8-bit, or a YAML file; gate it instead")
    tier.add_argument("--calibration", type=Path, metavar="FILE", help="what `flashrt calibrate` wrote for the tier")
    tier.add_argument("--reference", choices=("float32", "lerobot"), default="float32", help="default: float32, ours")
    tier.add_argument("--weights", default="not said", help="how the weights came to be, for the record")


def run(args: argparse.Namespace) -> int:
    """Print the tables; 1 below the bar."""
    return _gate(args) if args.tier else _parity(args)


def _gate(args: argparse.Namespace) -> int:
    from ..engine import EngineError
    from ..measure.errors import MeasureError
    from ..measure.pi05.tier_gate import GatePlan, run_gate, summary
    from ..policies import PolicyError
    from ..precision.errors import PrecisionError

    if args.calibration is None:
        raise CommandError("--tier needs --calibration FILE; make one with `flashrt calibrate`")
    try:
        with case_settings(args) as settings:
            settings |= {"precision": args.tier, "calibration": str(args.calibration)}
            plan = GatePlan(settings, args.device, args.reference, args.weights)
            report = run_gate(plan, lambda policy: read_observations(args, policy)[0], say=_say)
    except (PolicyError, EngineError, MeasureError, PrecisionError) as error:
        raise CommandError(str(error)) from None
    _write(args.out, report)
    print(summary(report))
    return 1 if report["failures"] else 0


def _parity(args: argparse.Namespace) -> int:
    from ..engine import EngineError
    from ..measure.errors import MeasureError
    from ..measure.pi05.checkpoint import default_settings
    from ..measure.pi05.observations import photographs
    from ..measure.pi05.verify import Plan, summary, verify
    from ..policies import PolicyError
    from ..policies.pi05.settings import resolve

    if args.checkpoint is None or args.observations is not None:
        raise CommandError("parity with LeRobot needs --checkpoint, and crops of photographs (--photographs N)")
    try:
        settings = {**default_settings(args.checkpoint), **weights_settings(args)}
        whole = resolve(settings).config
        views = [count for count in args.views if count <= len(whole.views)]
        if not views:
            raise CommandError(f"--views asks for {args.views}, the checkpoint has {len(whole.views)}")
        plan = Plan(settings, args.device, views, args.steps, args.photographs or 24, args.seed)
        report = verify(plan, photographs(args.images), whole, say=_say)
    except (PolicyError, EngineError, MeasureError) as error:
        raise CommandError(str(error)) from None
    _write(args.out, report)
    print(summary(report))
    return 1 if report["failures"] else 0


def _write(path: Path | None, report: Mapping[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=2) + "\n")


def _say(text: str) -> None:
    print(f"verify: {text}", file=sys.stderr, flush=True)
