"""`flashrt plot`: a result file as a picture of latency against agreement."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .main import CommandError
from .measured import read_report

NAME = "plot"
HELP = "draw latency against agreement with float32 for every result that `flashrt bench` wrote into a file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the result file, the picture, and what stands on its axes."""
    parser.add_argument("results", type=Path, metavar="RESULTS", help="what `flashrt bench --out` wrote")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="picture to write (.png, .svg, .pdf)")
    parser.add_argument(
        "--agreement", choices=("cosine", "error"), default="cosine",
        help="1 - cosine, with the worst observation, or relative error (default: cosine)",
    )  # fmt: skip
    parser.add_argument(
        "--linear",
        action="store_true",
        help="latency on a linear axis (default: logarithmic where marks lie far apart)",
    )


def run(args: argparse.Namespace) -> int:
    """Draw every configuration that has an agreement; say which results have none."""
    from ..measure.agreement import draw, panels
    from ..measure.errors import MeasureError

    results = read_report(args.results)
    if not isinstance(results, list):
        raise CommandError(f"{args.results} is no list of results; give what `flashrt bench --out` wrote")
    try:
        found = panels(results, args.agreement, _say)
        draw(found, args.agreement, args.out, linear=args.linear)
    except MeasureError as error:
        raise CommandError(f"{args.results}: {error}") from None
    print(f"{args.out}: {sum(len(panel.points) for panel in found)} of {len(results)} results")
    return 0


def _say(text: str) -> None:
    print(f"plot: {text}", file=sys.stderr, flush=True)
