"""`flashrt demo`: real nodes over DDS for some seconds, a table, and a picture of what they did."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

NAME = "demo"
HELP = "start two cameras, a robot and the policy node, and watch the action chunks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare how long, where to and with which parameters."""
    parser.add_argument(
        "--seconds",
        type=_duration,
        default=20.0,
        help="time from when every process takes part to the end (default: 20)",
    )
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder of the results (default: demo_out)")
    parser.add_argument(
        "--params", type=Path, help="parameter file of the policy node (default: config/pi05_tiny.yaml)"
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo; 1 after one line on standard error if it could not begin or go on."""
    from ..node.demo.errors import DemoError

    try:
        from ..node.demo.run import DemoOptions, run_demo

        return run_demo(DemoOptions(args.seconds, args.out, args.params))
    except (DemoError, OSError) as error:
        print(f"flashrt demo: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        print(
            f"flashrt demo: the module '{error.name}' is missing; run `make demo`, or install the extra with "
            "`pip install 'flashrt_ros[demo]'` where ROS 2 is available",
            file=sys.stderr,
        )
        return 1


def _duration(text: str) -> float:
    seconds = float(text)
    if not 2.0 <= seconds <= 3600.0:
        raise argparse.ArgumentTypeError(f"{seconds:g} s is not between 2 s and 3600 s")
    return seconds
