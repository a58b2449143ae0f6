"""Finding subcommands and running one."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Iterable, Sequence
from typing import Protocol, cast

from .. import __version__


class Command(Protocol):
    """What a subcommand module offers."""

    NAME: str
    HELP: str

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Declare the subcommand's arguments."""

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Do the work; the value is the exit code."""


class CommandError(Exception):
    """The user's mistake, told in one line and answered with exit code 2."""


def commands() -> Iterable[Command]:
    """Every subcommand of this installation, by name."""
    package = importlib.import_module(__package__)
    names = [info.name for info in pkgutil.iter_modules(package.__path__) if info.name != "__main__"]
    modules = [importlib.import_module(f"{__package__}.{name}") for name in names]
    found = [cast(Command, module) for module in modules if hasattr(module, "NAME")]
    return sorted(found, key=lambda command: command.NAME)


def build_parser() -> argparse.ArgumentParser:
    """The command line of `flashrt`."""
    parser = argparse.ArgumentParser(prog="flashrt", description="On-robot inference of robot policies.")
    parser.add_argument("--version", action="version", version=f"flashrt_ros {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in commands():
        subparser = subparsers.add_parser(command.NAME, help=command.HELP, description=command.HELP)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run `flashrt` with `argv` (the process's arguments by default); returns the exit code."""
    args = build_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except CommandError as error:
        print(f"flashrt: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `flashrt contract show … | head`
        sys.stderr.close()
        return 0
