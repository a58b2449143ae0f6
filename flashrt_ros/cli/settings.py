"""Arguments that several subcommands share: which policy, with which settings, on which device."""

from __future__ import annotations

import argparse
from typing import Any

from .main import CommandError


def add_policy_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--policy`, `--set` and `--device`."""
    parser.add_argument(
        "--policy",
        default="pi05",
        help="policy folder under flashrt_ros.policies (default: pi05)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="one setting of the policy, as in its YAML; may be repeated (default: preset=pi05_tiny)",
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")


def policy_settings(assignments: list[str]) -> dict[str, Any]:
    """`KEY=VALUE` texts as a mapping with YAML values; CommandError for text without `=` or with invalid YAML."""
    import yaml

    settings: dict[str, Any] = {}
    for text in assignments or ["preset=pi05_tiny"]:
        key, separator, value = text.partition("=")
        if not separator or not key:
            raise CommandError(f"--set {text!r}: expected KEY=VALUE, for example --set preset=pi05_tiny")
        try:
            settings[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise CommandError(f"--set {text!r}: the value is not valid YAML ({error.__class__.__name__})") from None
    return settings
