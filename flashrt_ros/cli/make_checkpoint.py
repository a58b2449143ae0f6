"""`flashrt make-checkpoint`: a checkpoint of any size with seeded random weights, in LeRobot's own format."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from .main import CommandError

NAME = "make-checkpoint"
HELP = "write a LeRobot checkpoint with seeded random weights, for benchmarks and parity tests"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare where to, of which size, and from which seed."""
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write; must not exist yet")
    parser.add_argument("--preset", default="pi05", help="sizes: pi05 (9 GB in bfloat16) or pi05_tiny (default: pi05)")
    parser.add_argument("--seed", type=int, default=0, help="of every weight (default: 0)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="of the file (default: the preset's)")
    parser.add_argument("--views", type=int, default=3, help="number of cameras, 1 to 3 (default: 3)")
    parser.add_argument("--chunk", type=int, default=50, help="actions in a chunk (default: 50)")


def run(args: argparse.Namespace) -> int:
    """Write the folder and say how large it is and how long that took."""
    from ..measure.errors import MeasureError
    from ..measure.pi05.checkpoint import VIEWS, checkpoint_config, make_checkpoint
    from ..policies import PolicyError
    from ..policies.pi05.presets import PRESETS

    if args.preset not in PRESETS:
        raise CommandError(f"unknown preset '{args.preset}'; there are: {', '.join(PRESETS)}")
    if not 1 <= args.views <= len(VIEWS):
        raise CommandError(f"--views is {args.views}, expected 1 to {len(VIEWS)}")
    if args.out.exists():
        raise CommandError(f"{args.out} exists already; remove it or choose another folder")
    changes = {"dtype": args.dtype} if args.dtype else {}
    start = time.perf_counter()
    try:
        config = checkpoint_config(args.preset, views=VIEWS[: args.views], chunk=args.chunk, **changes)
        size = make_checkpoint(args.out, config, args.seed)
    except (PolicyError, MeasureError) as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise CommandError(f"cannot write {args.out}: {error.strerror}") from None
    seconds = time.perf_counter() - start
    print(f"{args.out}: {size / 1e9:.2f} GB of {config.dtype} weights, seed {args.seed}, {seconds:.1f} s")
    sys.stdout.flush()
    return 0
