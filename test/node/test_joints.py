"""Joints by name, in both directions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrt_ros.node.joints import ActionMap, JointError, StateReader

ARM = ("shoulder", "elbow", "wrist")


def reader() -> StateReader:
    return StateReader(ARM, "policy 'pi05'")


@given(order=st.permutations(("wheel", *ARM, "gripper")))
def test_positions_are_found_by_name_in_any_order_and_others_are_ignored(order: list[str]) -> None:
    position = {"shoulder": 0.5, "elbow": -1.25, "wrist": 3.0, "wheel": np.nan, "gripper": 9.0}
    values = reader().read(tuple(order), np.array([position[name] for name in order]))
    assert values.dtype == np.float32
    assert values.tolist() == [0.5, -1.25, 3.0]


def test_an_order_that_changes_between_messages_is_followed() -> None:
    subject = reader()
    assert subject.read(ARM, np.array([1.0, 2.0, 3.0])).tolist() == [1, 2, 3]
    assert subject.read(ARM[::-1], np.array([1.0, 2.0, 3.0])).tolist() == [3, 2, 1]
    assert subject.read(ARM, np.array([1.0, 2.0, 3.0])).tolist() == [1, 2, 3]


def test_the_result_does_not_change_with_the_message() -> None:
    positions = np.array([1.0, 2.0, 3.0])
    values = reader().read(ARM, positions)
    positions[:] = 0
    assert values.tolist() == [1, 2, 3]


def test_a_missing_joint_is_refused_with_the_names_of_both_sides() -> None:
    with pytest.raises(JointError) as caught:
        reader().read(("shoulder", "elbow", "Wrist"), np.zeros(3))
    text = str(caught.value)
    assert "lacks 'wrist'" in text
    assert "policy 'pi05' expects 'shoulder', 'elbow', 'wrist'" in text
    assert "publishes 'shoulder', 'elbow', 'Wrist'" in text


def test_a_joint_that_a_message_lists_twice_is_refused() -> None:
    with pytest.raises(JointError, match="lists 'elbow' more than once, in 'shoulder', 'elbow', 'wrist', 'elbow'"):
        reader().read((*ARM, "elbow"), np.zeros(4))


@pytest.mark.parametrize("count", [0, 2, 4])
def test_names_and_positions_of_different_number_are_refused(count: int) -> None:
    with pytest.raises(JointError, match=f"3 names and {count} positions"):
        reader().read(ARM, np.zeros(count))


def test_an_empty_joint_state_is_refused_as_lacking_every_joint() -> None:
    with pytest.raises(JointError, match="lacks 'shoulder', 'elbow', 'wrist'"):
        reader().read((), np.zeros(0))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
def test_a_position_that_is_no_number_is_refused_by_joint(value: float) -> None:
    with pytest.raises(JointError, match=r"gives 'elbow' the position \S+, which no joint can have"):
        reader().read(ARM, np.array([0.0, value, 0.0]))


def test_a_refused_message_does_not_spoil_the_next_one() -> None:
    subject = reader()
    with pytest.raises(JointError):
        subject.read(("elbow",), np.zeros(1))
    assert subject.read(ARM[::-1], np.array([1.0, 2.0, 3.0])).tolist() == [3, 2, 1]


@pytest.mark.parametrize(
    ("names", "words"),
    [(("a", "b", "a"), "names 'a' more than once"), (("a", ""), "an empty name"), ((), "has no names")],
)
def test_a_policy_with_unusable_names_is_refused(names: tuple[str, ...], words: str) -> None:
    with pytest.raises(JointError, match=f"policy 'pi05' .*{words}|policy 'pi05' {words}"):
        StateReader(names, "policy 'pi05'")


def padded_action() -> tuple[str, ...]:
    """A 32-wide action of which three columns, scattered, have names."""
    names = [""] * 32
    names[0], names[5], names[31] = "elbow", "wrist", "shoulder"
    return tuple(names)


def test_a_padded_action_is_sliced_by_name_into_the_order_of_the_robot() -> None:
    action_map = ActionMap(padded_action(), ARM)
    actions = np.arange(4 * 32, dtype=np.float32).reshape(4, 32)
    selected = action_map.select(actions)
    assert selected.dtype == np.float32
    assert selected.flags.c_contiguous
    np.testing.assert_array_equal(selected, actions[:, [31, 0, 5]])
    assert action_map.dropped == ()


def test_named_columns_that_no_joint_takes_are_told() -> None:
    action_map = ActionMap(("elbow", "gripper", "wrist"), ("wrist",))
    assert action_map.dropped == ("elbow", "gripper")
    assert action_map.select(np.array([[1, 2, 3]], np.float32)).tolist() == [[3]]


def test_a_joint_that_the_policy_does_not_drive_is_refused_with_both_names() -> None:
    with pytest.raises(JointError) as caught:
        ActionMap(padded_action(), ("shoulder", "hip"))
    text = str(caught.value)
    assert "has no 'hip'" in text
    assert "the robot expects 'shoulder', 'hip'" in text
    assert "the policy gives 'elbow', 'wrist', 'shoulder'" in text


@pytest.mark.parametrize(
    ("action", "joints", "words"),
    [
        (("a", "b", "a"), ("a",), "the policy's action names 'a' more than once"),
        (("a", "b"), ("b", "b"), "the robot's joint list names 'b' more than once"),
        (("a", "b"), (), "the robot's joint list has no names"),
        (("a", ""), ("a", ""), "the robot's joint list has an empty name"),
        (("", ""), ("a",), "the policy's action has no names"),
    ],
)
def test_names_that_are_repeated_or_empty_are_refused(
    action: tuple[str, ...], joints: tuple[str, ...], words: str
) -> None:
    with pytest.raises(JointError, match=words):
        ActionMap(action, joints)


@pytest.mark.parametrize("shape", [(4, 31), (32,), (2, 4, 32)])
def test_actions_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(JointError, match=r"expected \[chunk, 32\]"):
        ActionMap(padded_action(), ARM).select(np.zeros(shape, np.float32))
