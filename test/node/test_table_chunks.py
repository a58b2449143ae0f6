"""The rows of "Inputs that have broken other people's nodes" about joints, the policy's output and the instruction."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus

from flashrt_ros.msg import Refusal
from test.node.latch import LATCH
from test.node.rig import Recorder, Rig, record_chunks, record_status, wait_until
from test.node.robot import default_robot, image_message, joint_message, solid

NAN_FROM_DARK_FRONT: dict[str, Any] = {"policy.action_names": ["a", "log_front"]}


def chunk_causes(status: Any) -> dict[int, int]:
    return {refusal.cause: refusal.count for refusal in status.chunk_refusals}


def test_permuted_joints_are_mapped_by_name(rig: Rig) -> None:
    robot = default_robot(rig)
    robot.sensors["joint_states"].message = joint_message({"gripper": 9.0, "c": 0.3, "a": 0.1, "b": 0.2})
    robot.start()
    chunks = record_chunks(rig)
    rig.active_policy({"policy.action_names": ["b", "c", "a"]})
    chunk = chunks.next()[0]
    assert dict(zip(chunk.joint_names, np.round(chunk.data[:3], 4), strict=True)) == {"b": 0.2, "c": 0.3, "a": 0.1}


def test_a_padded_32_wide_action_is_sliced_by_name(rig: Rig) -> None:
    default_robot(rig).start()
    chunks = record_chunks(rig)
    columns = ["c", "words", "a", "noise", "b", *[""] * 27]
    rig.active_policy({"policy.action_names": columns, "action_joints": ["a", "b", "c"]})
    chunk = chunks.next()[0]
    assert list(chunk.joint_names) == ["a", "b", "c"]
    assert np.allclose(np.reshape(chunk.data, (chunk.horizon, 3)), [0.1, 0.2, 0.3])


@pytest.mark.parametrize(("brightness", "value"), [(10, "nan"), (100, "-inf")], ids=["nan", "inf"])
def test_nan_or_inf_in_the_policys_output_drops_the_whole_chunk(rig: Rig, brightness: int, value: str) -> None:
    robot = default_robot(rig)
    robot.sensors["front"].message = image_message(solid(brightness, brightness, brightness))
    robot.start()
    chunks, statuses = record_chunks(rig), record_status(rig)
    diagnostics = Recorder(rig, DiagnosticArray, "/diagnostics")
    rig.active_policy(NAN_FROM_DARK_FRONT)
    status = statuses.wait_for(lambda m: Refusal.NOT_FINITE in chunk_causes(m), "the chunk is refused")
    assert "joint 'log_front' at step 0" in status.reason
    assert value in status.reason

    def is_error(message: DiagnosticArray) -> bool:
        return any(s.name == "policy: policy" and s.level == DiagnosticStatus.ERROR for s in message.status)

    error = diagnostics.wait_for(is_error, "a diagnostic ERROR")
    assert "log_front" in next(s.message for s in error.status if s.name == "policy: policy")
    assert not len(chunks)
    robot.sensors["front"].message = image_message(solid(200, 200, 200))
    assert math.isclose(chunks.next()[0].data[1], math.log(100), rel_tol=1e-5)


def test_an_instruction_that_changes_during_a_replay_ends_its_epoch(rig: Rig) -> None:
    robot = default_robot(rig).start()
    chunks, statuses = record_chunks(rig), record_status(rig)
    rig.active_policy({"instruction": "one", "policy.action_names": ["a", "words"]})
    epoch = chunks.next()[0].epoch
    LATCH.close()
    wait_until(LATCH.entered.is_set, "a replay is under way")
    count = len(chunks)
    robot.tell("one two")
    statuses.wait_for(lambda m: m.epoch > epoch and m.instruction == "one two", "the new instruction")
    LATCH.open()
    chunks.next(3)
    for chunk in chunks.messages[count:]:
        assert chunk.epoch > epoch
        assert chunk.instruction == "one two"
        assert chunk.data[1] == 2.0  # the policy counted the words of the new one
    statuses.wait_for(lambda m: chunk_causes(m).get(Refusal.OLD_EPOCH) == 1, "the old result is counted")


def test_the_same_instruction_again_changes_nothing(rig: Rig) -> None:
    robot = default_robot(rig).start()
    chunks, statuses = record_chunks(rig), record_status(rig)
    rig.active_policy({"instruction": "one"})
    epoch = chunks.next()[0].epoch
    robot.tell("one")
    statuses.wait_for(lambda m: m.streams[-1].received == 1, "the instruction arrived")
    assert chunks.next()[0].epoch == epoch


@pytest.mark.parametrize("empty", ["", "  \n"])
def test_an_empty_instruction_gives_no_chunks_and_the_status_says_why(rig: Rig, empty: str) -> None:
    robot = default_robot(rig).start()
    chunks, statuses = record_chunks(rig), record_status(rig)
    rig.active_policy({"instruction": "go"})
    chunks.next()
    robot.tell(empty)
    statuses.wait_for(lambda m: "instruction" in m.reason, "the reason is the instruction")
    statuses.next(2)
    count = len(chunks)
    statuses.next(3)
    assert len(chunks) == count
    robot.tell("go on")
    assert chunks.next()[0].instruction == "go on"


def test_an_instruction_that_the_policy_refuses_is_counted_and_the_next_one_works(rig: Rig) -> None:
    robot = default_robot(rig).start()
    chunks, statuses = record_chunks(rig), record_status(rig)
    rig.active_policy({"instruction": "word " * 21})
    status = statuses.wait_for(lambda m: m.streams[-1].refused > 0, "the instruction is refused")
    assert "21 words" in status.reason
    assert {r.cause for r in status.streams[-1].refusals} == {Refusal.BAD_INSTRUCTION}
    assert not len(chunks)
    robot.tell("short")
    assert chunks.next()[0].instruction == "short"


@pytest.mark.parametrize(
    ("parameters", "cause", "words"),
    [
        ({"limits.b.upper": 0.15}, Refusal.LIMIT, "joint 'b' at step 0"),
        ({"max_step": 0.01, "policy.drift": 0.02}, Refusal.STEP, "from step 0"),
        ({"max_first_step": 0.1, "policy.offset": 0.2}, Refusal.FIRST_STEP, "0.2 from the measured 0.1, limit 0.1"),
    ],
    ids=["limit", "step", "first_step"],
)
def test_a_chunk_outside_the_limits_is_dropped_whole(
    rig: Rig, parameters: dict[str, Any], cause: int, words: str
) -> None:
    default_robot(rig).start()
    chunks, statuses = record_chunks(rig), record_status(rig)
    rig.active_policy(parameters)
    status = statuses.wait_for(lambda m: cause in chunk_causes(m), "the chunk is refused")
    assert words in status.reason
    assert not len(chunks)
