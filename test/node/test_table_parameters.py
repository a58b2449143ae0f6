"""The rows of "Inputs that have broken other people's nodes" about parameter files, and parameters on a live node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rcl_interfaces.msg import Parameter, ParameterType, ParameterValue
from rcl_interfaces.srv import DescribeParameters, SetParameters

from flashrt_ros.msg import Refusal
from flashrt_ros.node.parameters import PARAMETERS
from flashrt_ros.node.policy_node import PolicyNode
from test.node.rig import PROBE, Rig, record_chunks, record_errors, record_status
from test.node.robot import default_robot
from test.node.test_table_streams import causes_of, stream_of


def node_with_file(rig: Rig, path: Path, text: str) -> PolicyNode:
    """A node that reads its parameters from a file of this text."""
    path = path / "params.yaml"
    path.write_text(text)
    return rig.policy(cli_args=["--ros-args", "--params-file", str(path)])


def failure(rig: Rig, node: PolicyNode) -> str:
    """The one line with which configure fails."""
    errors = record_errors(rig)
    assert not node.transition("configure")
    text: str = errors.wait_for(lambda m: m.msg.startswith("configure failed: "), "the reason is logged").msg
    assert node.state == "unconfigured"
    assert "\n" not in text
    return text.removeprefix("configure failed: ")


def set_parameter(rig: Rig, name: str, value: ParameterValue) -> Any:
    """What `ros2 param set` or `ros2 param delete` does."""
    request = SetParameters.Request(parameters=[Parameter(name=name, value=value)])
    return rig.call(SetParameters, "policy/set_parameters", request).results[0]


def text_value(text: str) -> ParameterValue:
    return ParameterValue(type=ParameterType.PARAMETER_STRING, string_value=text)


def test_an_integer_for_a_double_is_accepted(rig: Rig, tmp_path: Path) -> None:
    default_robot(rig).start()
    chunks = record_chunks(rig)
    text = "{'/**': {ros__parameters: {rate_hz: 10, instruction: go, max_age: 1, policy: {name: probe}}}}"
    node = node_with_file(rig, tmp_path, text)
    assert node.get_parameter("rate_hz").value == 10.0
    assert node.transition("configure")
    assert node.transition("activate")
    assert chunks.next()


def test_a_file_addressed_to_a_wrong_node_name_fails_loudly(rig: Rig, tmp_path: Path) -> None:
    node = node_with_file(rig, tmp_path, "other_node: {ros__parameters: {policy: {name: probe, checkpoint: /weights}}}")
    text = failure(rig, node)
    assert "'policy.name' is not set" in text
    assert "no checkpoint" in text
    assert "'/policy:'" in text


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("action_joints: [a, elbow]", "has no 'elbow': the robot expects 'a', 'elbow', the policy gives 'a', 'b', 'c'"),
        (
            "limits: {elbow: {upper: 1.0}}",
            "'limits.elbow' is for a joint that chunks do not command; they command: a, b, c",
        ),
        (
            "views: {top: {topic: t}}",
            "'views.top' is for a view that policy 'probe' does not see; it sees: front, wrist",
        ),
        ("views: {wrist: {topic: front/image_raw}}", "topic 'front/image_raw' is that of several views (front, wrist)"),
        ("limits: {a: {lower: 2.0, upper: 1.0}}", "position limits of 'a' are 2.0 and 1.0; expected lower < upper"),
        ("rate: 10.0", "unknown parameter 'rate'; the nearest is 'rate_hz'"),
        ("rate_hz: fast", "parameter 'rate_hz' is 'fast' (string), expected a double"),
        ("rate_hz: 0.0", "parameter 'rate_hz' is 0, expected 0.01 to 1000"),
        ("views: {front: {compressed: 1}}", "parameter 'views.front.compressed' is 1 (integer), expected a boolean"),
        ("device: cuda:99", "device 'cuda:99' was asked for"),
        ("device: gpu", "unknown device 'gpu'"),
    ],
)
def test_a_wrong_setting_fails_with_one_line_that_says_what(rig: Rig, tmp_path: Path, setting: str, words: str) -> None:
    text = f"policy:\n  ros__parameters:\n    policy: {{name: probe}}\n    {setting}\n"
    assert words in failure(rig, node_with_file(rig, tmp_path, text))


def test_an_unknown_setting_of_the_policy_fails_with_what_is_known(rig: Rig, tmp_path: Path) -> None:
    node = node_with_file(rig, tmp_path, "policy: {ros__parameters: {policy: {name: probe, chunks: 3}}}")
    assert "unknown setting 'chunks'; known: action_dt" in failure(rig, node)


def test_an_unknown_policy_fails_with_what_is_installed(rig: Rig, tmp_path: Path) -> None:
    node = node_with_file(rig, tmp_path, "policy: {ros__parameters: {policy: {name: pi5}}}")
    assert "unknown policy 'pi5'" in failure(rig, node)


def test_a_joint_that_the_robot_lacks_is_refused_with_both_sides_names(rig: Rig) -> None:
    default_robot(rig).start()
    statuses = record_status(rig)
    rig.active_policy({"policy.state_names": ["a", "elbow"], "policy.action_names": ["a"]})
    status = statuses.wait_for(
        lambda m: Refusal.BAD_JOINT_STATE in causes_of(stream_of(m, "joint_states")), "the joint state is refused"
    )
    reason = stream_of(status, "joint_states").reason
    assert "policy 'probe' expects 'a', 'elbow'" in reason
    assert "the robot publishes 'a', 'b', 'c'" in reason


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [("rate_hz", "'fast'", 5.0), ("device", "gpu", "cpu"), ("policy.name", "pi5", "probe")],
)
def test_a_wrong_value_is_mended_on_the_live_node(rig: Rig, tmp_path: Path, name: str, bad: str, good: Any) -> None:
    values = {"policy.name": "probe", name: bad}
    lines = "".join(f"    {key}: {value}\n" for key, value in values.items())
    node = node_with_file(rig, tmp_path, f"policy:\n  ros__parameters:\n{lines}")
    assert not node.transition("configure")
    assert node.set_parameters([rig.parameter(name, good)])[0].successful
    assert node.transition("configure")


def test_an_unknown_parameter_is_mended_by_deleting_it(rig: Rig, tmp_path: Path) -> None:
    node = node_with_file(rig, tmp_path, "policy: {ros__parameters: {rates: 3, policy: {name: probe}}}")
    assert "ros2 param delete /policy rates" in failure(rig, node)
    assert set_parameter(rig, "rates", ParameterValue()).successful
    assert node.transition("configure")


def test_parameters_are_described_typed_and_ranged(rig: Rig) -> None:
    rig.policy(PROBE)
    names = [row.name for row in PARAMETERS]
    answer = rig.call(DescribeParameters, "policy/describe_parameters", DescribeParameters.Request(names=names))
    described = {d.name: d for d in answer.descriptors}
    for row in PARAMETERS:
        assert described[row.name].description == row.description
        assert described[row.name].read_only == row.read_only
        assert described[row.name].type != ParameterType.PARAMETER_NOT_SET
    assert described["rate_hz"].floating_point_range[0].to_value == 1000.0
    assert described["warmup"].integer_range[0].from_value == 0
    assert described["stall_policy"].additional_constraints == "one of none, hold, stop"


def test_settings_on_a_live_node_are_guarded(rig: Rig) -> None:
    node = rig.policy(PROBE)
    ten = ParameterValue(type=ParameterType.PARAMETER_INTEGER, integer_value=10)
    assert set_parameter(rig, "rate_hz", ten).successful
    assert node.get_parameter("rate_hz").value == 10.0
    result = set_parameter(rig, "rate", ten)
    assert (result.successful, result.reason) == (False, "unknown parameter 'rate'; the nearest is 'rate_hz'")
    assert not set_parameter(rig, "stall_policy", text_value("panic")).successful
    assert not set_parameter(rig, "autostart", ParameterValue(type=1, bool_value=True)).successful
    assert not set_parameter(rig, "rate_hz", text_value("fast")).successful
    assert set_parameter(rig, "policy.checkpoint", text_value("")).successful
    assert node.transition("configure")
    result = set_parameter(rig, "rate_hz", ten)
    assert not result.successful
    assert "clean up first" in result.reason
    assert node.transition("cleanup")
    assert set_parameter(rig, "rate_hz", ten).successful
