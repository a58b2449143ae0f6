"""The node's benchmark on a GPU, as far as it goes without one: what it tells the node of a checkpoint is enough."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from flashrt_ros.cli import main
from flashrt_ros.measure.pi05.subject import Case
from flashrt_ros.node.building import build_runner, check_views, chunk_gate
from flashrt_ros.node.demo.scene import JOINTS
from flashrt_ros.node.parameters import Settings, settings_from
from test.benchmarks.scripts import module, run

CASE = Case(views=2, chunk=10, tokens=111)
TINY = ["preset=pi05_tiny"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("node") / "checkpoint"
    assert main(["make-checkpoint", "--preset", "pi05_tiny", "--out", str(folder)]) == 0
    return folder


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested parameters by their dotted names, as ROS reads a file."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def node_settings(checkpoint: Path, folder: Path) -> Settings:
    benchmark = module("node_gpu")
    policy = benchmark.policy_of(checkpoint, CASE, TINY, folder / "cut")
    parameters = yaml.safe_load(benchmark.parameter_file(policy, folder).read_text())["/**"]["ros__parameters"]
    return settings_from({**flat(parameters), **benchmark.PARAMETERS}, "/policy")


def test_the_node_starts_with_what_it_is_told_of_the_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    settings = node_settings(checkpoint, tmp_path)
    runner = build_runner(settings)
    try:
        policy = runner.policy
        check_views(settings, policy)
        assert {settings.view(view).topic for view in policy.views} == {"front/image_raw", "wrist/image_raw"}
        assert policy.chunk == CASE.chunk
        assert policy.state_names == tuple(joint.name for joint in JOINTS)  # what the demo's robot publishes
        assert chunk_gate(settings, policy).actions.joint_names == policy.state_names
    finally:
        runner.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "preset=pi05"], "--set is for a checkpoint; give --checkpoint too"),
        (["--checkpoint", "/nowhere"], "cannot read '/nowhere/config.json'"),
        (["--checkpoint", "/nowhere", "--set", "preset"], "expected KEY=VALUE"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments: list[str], message: str) -> None:
    done = run("node_gpu", *arguments)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
