"""The whole-chunk check: what it lets through, and the first fault that it names."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from flashrt_ros.node.chunk_checks import ChunkFault, ChunkLimits, FaultCode, check_chunk, hold_chunk
from flashrt_ros.node.joints import JointError

JOINTS = ("shoulder", "elbow", "gripper")
STEPS = 6
MEASURED = np.array([0.1, -0.2, 0.03], np.float32)


def limits() -> ChunkLimits:
    return ChunkLimits(
        JOINTS,
        positions={"shoulder": (-1.0, 1.0), "elbow": (-2.0, 2.0)},
        max_first_step={"shoulder": 0.2, "elbow": 0.2},
        max_step=0.1,
    )


def good_chunk() -> NDArray[np.float32]:
    """Starts at the measured state and moves each joint by 0.05 a step."""
    return MEASURED + np.float32(0.05) * np.arange(STEPS, dtype=np.float32)[:, np.newaxis]


def fault(chunk: NDArray[np.float32]) -> ChunkFault:
    found = check_chunk(chunk, STEPS, limits(), MEASURED)
    assert found is not None
    return found


def test_a_good_chunk_passes() -> None:
    assert check_chunk(good_chunk(), STEPS, limits(), MEASURED) is None


@pytest.mark.parametrize("shape", [(STEPS - 1, 3), (STEPS, 2), (3 * STEPS,), (0, 3), (1, STEPS, 3)])
def test_another_shape_is_a_fault(shape: tuple[int, ...]) -> None:
    found = fault(np.zeros(shape, np.float32))
    assert found.code is FaultCode.SHAPE
    assert f"shape {list(shape)}, expected [6, 3]" in found.text


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("step", "column"), [(0, 0), (3, 1), (5, 2)])
def test_a_value_that_is_no_number_is_a_fault_wherever_it_is(value: float, step: int, column: int) -> None:
    chunk = good_chunk()
    chunk[step, column] = value
    found = fault(chunk)
    assert (found.code, found.step, found.joint) == (FaultCode.NOT_FINITE, step, JOINTS[column])
    assert f"joint '{JOINTS[column]}' at step {step}: the policy's output is {value}" in found.text


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_no_number_is_a_fault_even_without_any_limit(value: float) -> None:
    chunk = good_chunk()
    chunk[2, 2] = value
    found = check_chunk(chunk, STEPS, ChunkLimits(JOINTS), None)
    assert found is not None
    assert found.code is FaultCode.NOT_FINITE


@pytest.mark.parametrize(("value", "limit", "word"), [(1.5, 1.0, "above the upper"), (-1.5, -1.0, "below the lower")])
def test_a_position_outside_its_limits_is_a_fault(value: float, limit: float, word: str) -> None:
    chunk = good_chunk()
    chunk[4, 0] = value
    found = fault(chunk)
    assert (found.code, found.joint, found.step, found.value, found.limit) == (
        FaultCode.LIMIT, "shoulder", 4, value, limit)  # fmt: skip
    assert f"joint 'shoulder' at step 4: position {value} is {word} limit {limit:g}" in found.text


def test_an_action_clipped_to_a_limit_is_no_fault() -> None:
    lower, upper = -2.7, 2.7
    assert float(np.float32(upper)) > upper
    chunk = np.array([[lower], [upper]], np.float32)
    assert check_chunk(chunk, 2, ChunkLimits(("a",), {"a": (lower, upper)}), None) is None


def test_a_first_step_far_from_the_measured_state_is_a_fault() -> None:
    chunk = good_chunk()
    chunk[:, 1] += np.float32(0.25)
    found = fault(chunk)
    assert (found.code, found.joint, found.step) == (FaultCode.FIRST_STEP, "elbow", 0)
    assert "position 0.05 is 0.25 from the measured -0.2, limit 0.2" in found.text


def test_a_joint_without_a_first_step_limit_may_start_anywhere() -> None:
    chunk = good_chunk()
    chunk[:, 2] += 50
    assert check_chunk(chunk, STEPS, limits(), MEASURED) is None


@pytest.mark.parametrize("direction", [-1, 1])
def test_a_jump_between_steps_is_a_fault(direction: int) -> None:
    chunk = good_chunk()
    chunk[3:, 2] += np.float32(0.2 * direction)
    found = fault(chunk)
    assert (found.code, found.joint, found.step) == (FaultCode.STEP, "gripper", 3)
    assert found.limit == pytest.approx(0.1)
    assert "from step 2, limit 0.1" in found.text


def test_the_first_fault_by_step_and_then_by_joint_is_named() -> None:
    chunk = good_chunk()
    chunk[4, 0] = chunk[2, 1] = chunk[2, 0] = 5
    found = fault(chunk)
    assert (found.code, found.step, found.joint) == (FaultCode.LIMIT, 2, "shoulder")


@given(start=st.floats(-3, 3), step=st.floats(0.001, 0.5))
def test_steps_of_exactly_the_limit_pass_in_spite_of_float32(start: float, step: float) -> None:
    chunk = (start + step * np.arange(STEPS)).astype(np.float32)[:, np.newaxis]
    measured = np.array([start - step], np.float32)
    assert check_chunk(chunk, STEPS, ChunkLimits(("a",), max_first_step=step, max_step=step), measured) is None


@given(start=st.floats(-3, 3), step=st.floats(0.001, 0.5))
def test_steps_a_thousandth_beyond_the_limit_fail(start: float, step: float) -> None:
    chunk = (start + step * np.arange(STEPS)).astype(np.float32)[:, np.newaxis]
    assert check_chunk(chunk, STEPS, ChunkLimits(("a",), max_step=0.998 * step), None) is not None


def test_a_first_step_limit_without_a_measured_state_is_a_mistake_of_the_caller() -> None:
    assert limits().needs_measured
    with pytest.raises(ValueError, match="measured position of 3 joints, got none"):
        check_chunk(good_chunk(), STEPS, limits(), None)
    with pytest.raises(ValueError, match=r"got shape \[2\]"):
        check_chunk(good_chunk(), STEPS, limits(), MEASURED[:2])


def test_a_measured_state_that_is_not_a_number_does_not_pass_the_first_step() -> None:
    broken = MEASURED.copy()
    broken[0] = np.nan
    found = check_chunk(good_chunk(), STEPS, limits(), broken)
    assert found is not None
    assert found.code is FaultCode.FIRST_STEP


def test_a_chunk_of_one_step_has_no_steps_to_compare() -> None:
    assert check_chunk(good_chunk()[:1], 1, limits(), MEASURED) is None


def test_a_chunk_that_holds_repeats_the_measured_positions_and_passes_the_check() -> None:
    chunk = hold_chunk(MEASURED, STEPS)
    assert chunk.dtype == np.float32
    assert chunk.flags.c_contiguous
    assert (chunk == MEASURED).all()
    assert check_chunk(chunk, STEPS, limits(), MEASURED) is None


@pytest.mark.parametrize("field", ["positions", "max_first_step", "max_step"])
def test_a_limit_for_an_unknown_joint_is_refused_with_the_names_of_both_sides(field: str) -> None:
    value: dict[str, object] = {"hip": (-1.0, 1.0) if field == "positions" else 0.1}
    with pytest.raises(JointError, match=r"\['hip'\], which are not published; the published joints are \['shoulder'"):
        ChunkLimits(JOINTS, **{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("bounds", [(1.0, 1.0), (1.0, -1.0), (math.nan, 1.0), (-1.0, math.nan)])
def test_position_limits_upside_down_are_refused(bounds: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="position limits of 'elbow'"):
        ChunkLimits(JOINTS, positions={"elbow": bounds})


@pytest.mark.parametrize("field", ["max_first_step", "max_step"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_a_step_limit_that_is_not_positive_is_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} of 'shoulder' is {value}"):
        ChunkLimits(JOINTS, **{field: value})  # type: ignore[arg-type]
