"""`flashrt contract`: show, export and compare plans."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from .main import CommandError
from .settings import add_policy_arguments, policy_settings

if TYPE_CHECKING:
    from ..contract import Contract

NAME = "contract"
HELP = "show a policy's execution contract, export it as JSON, or say how two differ"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the three actions and where a contract comes from."""
    parser.add_argument("action", choices=("show", "export", "diff"))
    parser.add_argument(
        "files",
        nargs="*",
        type=Path,
        help="exported contracts; without one, the policy's own is built",
    )
    add_policy_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the result. `diff` exits with 1 if the contracts differ."""
    from ..contract import show

    if args.action == "diff":
        return _diff(args)
    contract = _load(args.files[0]) if args.files else _build(args)
    print(show(contract) if args.action == "show" else contract.to_json(), end="")
    return 0


def _diff(args: argparse.Namespace) -> int:
    if len(args.files) not in (1, 2):
        raise CommandError("contract diff needs two exported files, or one to compare with the policy's own contract")
    one = _load(args.files[0])
    other = _load(args.files[1]) if len(args.files) == 2 else _build(args)
    differing = one.differences(other)
    print("\n".join(differing) if differing else f"equal: {one.fingerprint}")
    return 1 if differing else 0


def _load(path: Path) -> Contract:
    from ..contract import Contract, ContractError

    try:
        return Contract.from_json(path.read_text())
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}") from None
    except (ContractError, UnicodeDecodeError) as error:
        raise CommandError(f"{path}: {error}") from None


def _build(args: argparse.Namespace) -> Contract:
    from ..engine import EngineError
    from ..policies import PolicyError, build_policy

    try:
        return build_policy(args.policy, policy_settings(args.set), args.device).contract
    except (PolicyError, EngineError) as error:
        raise CommandError(str(error)) from None
