"""The launch files in the real `launch_ros`, which comes with ROS and not from PyPI."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

import pytest

from test.sources import ROOT

pytest.importorskip("launch_ros")
launch = importlib.import_module("launch")


def load(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(name.split(".")[0], ROOT / "launch" / name)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["policy.launch.py", "demo.launch.py"])
def test_arguments_are_shown_without_a_gpu_or_a_checkpoint(name: str) -> None:
    description = load(name).generate_launch_description()
    arguments = {argument.name: argument for argument in description.get_launch_arguments()}
    assert "params_file" in arguments
    assert all(argument.description != "no description given" for argument in arguments.values())
    assert all(argument.default_value is not None for argument in arguments.values())


def context_with(**given: str) -> object:
    context = launch.LaunchContext()
    defaults = {"checkpoint": "", "device": "", "instruction": "", "remap": ""}
    topics = {f"{topic}_topic": topic for topic in ("joint_states", "instruction", "action_chunk")}
    context.launch_configurations.update({**defaults, **topics, **given})
    return context


def test_only_arguments_that_are_given_override_the_file() -> None:
    policy = load("policy.launch.py")
    assert set(policy.overrides(context_with())) == {"autostart", "use_sim_time"}
    assert "policy.checkpoint" in policy.overrides(context_with(checkpoint="/weights"))


def test_topics_are_remapped() -> None:
    policy = load("policy.launch.py")
    context = context_with(joint_states_topic="/arm/joint_states", remap="front/image_raw:=/cam0/image")
    assert policy.remappings(context) == [("joint_states", "/arm/joint_states"), ("front/image_raw", "/cam0/image")]
    with pytest.raises(ValueError, match="'front' is not of the form from:=to"):
        policy.remappings(context_with(remap="front"))
