"""Arguments that `calibrate` and `verify --tier` share: which observations."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from .main import CommandError

if TYPE_CHECKING:
    from ..measure.pi05.observations import Observation
    from ..policies.pi05 import Pi05Policy

BAGS = (".mcap", ".db3")


def add_observation_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare where observations come from."""
    parser.add_argument(
        "--observations", type=Path, metavar="PATH",
        help="folder with observations.jsonl, or a ROS 2 recording (folder of a bag, or an .mcap file)",
    )  # fmt: skip
    parser.add_argument(
        "--photographs", type=int, metavar="N",
        help="N crops of photographs instead, with made-up prompts: for weights that were never trained",
    )  # fmt: skip
    parser.add_argument("--limit", type=int, default=128, help="observations at most (default: 128)")
    parser.add_argument("--seed", type=int, default=0, help="of noise and crops (default: 0)")
    bag = parser.add_argument_group("of a recording")
    bag.add_argument(
        "--topic", action="append", default=[], metavar="NAME=TOPIC",
        help="topic of a view, joint_states or instruction (default: <view>/image_raw, joint_states, instruction)",
    )  # fmt: skip
    bag.add_argument("--every", type=float, default=1.0, metavar="S", help="seconds between two (default: 1)")
    bag.add_argument("--max-age", type=float, default=0.5, metavar="S", help="of the newest message (default: 0.5)")
    bag.add_argument("--instruction", default="", help="where none was recorded")


def read_observations(args: argparse.Namespace, policy: Pi05Policy) -> tuple[list[Observation], str]:
    """The observations that the arguments name, and where they come from; CommandError without any."""
    from ..measure.pi05.observations import make_observations, photographs
    from ..measure.pi05.watched import observations_of
    from ..policies.samples import read_folder

    if (args.observations is None) == (args.photographs is None):
        raise CommandError("give either --observations PATH or --photographs N")
    count = args.photographs if args.observations is None else args.limit
    if count < 1:
        raise CommandError(f"{count} observations are none; give a number above 0")
    if args.observations is None:
        pictures = photographs(args.images)
        return make_observations(policy, count, pictures, args.seed), f"{count} crops of photographs"
    path: Path = args.observations
    if _is_bag(path):
        from ..node.bag import BagOptions, read_bag

        options = BagOptions(_topics(args.topic, policy.views), args.every, args.max_age, args.instruction)
        samples = read_bag(path, policy, options, count)
    else:
        samples = read_folder(path, policy, count)
    return observations_of(samples, policy, args.seed), str(path)


def _is_bag(path: Path) -> bool:
    return path.suffix in BAGS or (path / "metadata.yaml").is_file()


def _topics(assignments: list[str], views: tuple[str, ...]) -> dict[str, str]:
    topics = {**{view: f"{view}/image_raw" for view in views}, "joint_states": "joint_states"}
    topics["instruction"] = "instruction"
    for text in assignments:
        name, separator, topic = text.partition("=")
        if not separator or name not in topics or not topic:
            raise CommandError(f"--topic {text!r}: expected NAME=TOPIC, NAME one of {', '.join(topics)}")
        topics[name] = topic
    return topics
