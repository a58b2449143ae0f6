"""`flashrt verify`: is our policy the official one?"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from .main import CommandError
from .measured import add_weights_arguments, counts, weights_settings

NAME = "verify"
HELP = "compare a checkpoint's actions, keys and values with LeRobot's own implementation"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the checkpoint, what is compared, and where the report goes."""
    add_weights_arguments(parser, required=True)
    parser.add_argument("--observations", type=int, default=24, help="how many in all (default: 24)")
    parser.add_argument("--views", type=counts, default=(1, 2, 3), metavar="N,N", help="cameras (default: 1,2,3)")
    parser.add_argument("--steps", type=counts, default=(1, 2, 10), metavar="N,N", help="default: 1,2,10")
    parser.add_argument("--seed", type=int, default=0, help="of crops, prompts and noise (default: 0)")
    parser.add_argument("--out", type=Path, help="write the whole report as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the tables; 1 below the bar."""
    from ..engine import EngineError
    from ..measure.errors import MeasureError
    from ..measure.pi05.checkpoint import default_settings
    from ..measure.pi05.observations import photographs
    from ..measure.pi05.verify import Plan, summary, verify
    from ..policies import PolicyError
    from ..policies.pi05.settings import resolve

    try:
        settings = {**default_settings(args.checkpoint), **weights_settings(args)}
        whole = resolve(settings).config
        views = [count for count in args.views if count <= len(whole.views)]
        if not views:
            raise CommandError(f"--views asks for {args.views}, the checkpoint has {len(whole.views)}")
        plan = Plan(settings, args.device, views, args.steps, args.observations, args.seed)
        report = verify(plan, photographs(args.images), whole, say=_say)
    except (PolicyError, EngineError, MeasureError) as error:
        raise CommandError(str(error)) from None
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=2) + "\n")
    print(summary(report))
    return 1 if report["failures"] else 0


def _say(text: str) -> None:
    print(f"verify: {text}", file=sys.stderr, flush=True)
