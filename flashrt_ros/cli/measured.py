"""Arguments that `bench`, `profile` and `verify` share: which weights, on which device, looking at what."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .main import CommandError
from .settings import policy_settings

Case = tuple[int, int]


def add_weights_arguments(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """Declare `--checkpoint`, `--device`, `--images` and `--set`."""
    default = "" if required else " (default: the preset's own weights)"
    parser.add_argument(
        "--checkpoint", type=Path, required=required, metavar="DIR", help=f"folder that LeRobot wrote{default}"
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    parser.add_argument("--images", type=Path, nargs="*", default=[], help="photographs (default: scikit-image's)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="one setting of the policy; may be repeated"
    )


def weights_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that the arguments say; a checkpoint is of the true size unless `--set preset=…` says otherwise."""
    if args.checkpoint is None:
        return policy_settings(args.set)
    given = policy_settings(args.set) if args.set else {}
    return {"preset": "pi05", **given, "checkpoint": str(args.checkpoint)}


def add_case_arguments(parser: argparse._ActionsContainer) -> None:
    """Declare `--case` and `--tokens`: the configuration that a checkpoint is cut to."""
    parser.add_argument(
        "--case", type=cases, metavar="VxC", help="views x chunk, as in `bench` (default: all, its own)"
    )
    parser.add_argument("--tokens", type=int, help="prompt tokens, as in `bench` (default: the policy's buckets)")


@contextmanager
def case_settings(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The settings that the arguments say, within the block: a cut of the checkpoint lives in a folder of its own."""
    from ..measure.pi05.subject import Case

    if args.case is not None and len(args.case) != 1:
        raise CommandError("--case takes one configuration, such as 2x10")
    views, chunk = args.case[0] if args.case else (None, None)
    with tempfile.TemporaryDirectory() as folder:
        yield Case(views, chunk, args.tokens).settings(weights_settings(args), Path(folder) / "checkpoint")


def cases(text: str) -> list[Case]:
    """ "2x10,3x50" as (views, chunk) pairs."""
    try:
        return [(int(views), int(chunk)) for views, chunk in (part.split("x") for part in text.split(","))]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of views x chunk, such as 2x10,3x50") from None


def counts(text: str) -> tuple[int, ...]:
    """ "1,2,10" as numbers above 0."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of counts above 0, such as 1,2,10")
    return numbers


def read_report(path: Path) -> Any:
    """The JSON that another subcommand wrote to `path`; CommandError if it cannot be read."""
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise CommandError(f"{path} is not valid JSON ({error}); write it anew with --out") from None
