"""`flashrt calibrate`: what a precision tier must know of activations, measured once, kept in a file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .looked_at import add_observation_arguments, read_observations
from .main import CommandError
from .measured import add_case_arguments, add_weights_arguments, case_settings

NAME = "calibrate"
HELP = "measure the scales of a precision tier on recorded observations, and write its calibration file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the tier, the policy, the observations and the file."""
    parser.add_argument("--tier", default="8-bit", help="8-bit, 4-bit, another preset, or a YAML file (default: 8-bit)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="calibration to write (.safetensors)")
    add_weights_arguments(parser)
    add_case_arguments(parser)
    add_observation_arguments(parser)
    parser.add_argument(
        "--percentile", type=float, default=100.0, help="of magnitudes that a scale must hold (default: 100, all)"
    )
    parser.add_argument("--headroom", type=float, default=2.0, help="factor that a scale leaves above it (default: 2)")


def run(args: argparse.Namespace) -> int:
    """Calibrate, write the file, print the worst sites."""
    from ..engine import EngineError
    from ..measure.errors import MeasureError
    from ..measure.pi05.calibrate import calibrate_tier, summary
    from ..measure.pi05.watched import Watched
    from ..policies import PolicyError
    from ..precision.calibration import save_calibration
    from ..precision.errors import PrecisionError
    from ..precision.tier import load_tier

    try:
        tier = load_tier(args.tier)
        with case_settings(args) as settings:
            watched = Watched(settings, args.device)
        observations, source = read_observations(args, watched.policy)
        calibration = calibrate_tier(
            watched, tier, observations, source=source, percentile=args.percentile, headroom=args.headroom
        )
        save_calibration(args.out, calibration)
    except (PolicyError, EngineError, MeasureError, PrecisionError) as error:
        raise CommandError(str(error)) from None
    print(summary(calibration, watched))
    print(f"\n{args.out}: calibration {calibration.digest[:16]} of {len(observations)} observations. Next:")
    print(f"flashrt verify --tier {args.tier} --calibration {args.out} … with the same policy and other observations")
    sys.stdout.flush()
    return 0
