"""The last look at a chunk before a robot gets it: all of it is good, or none of it is published.

A controller downstream may take anything for a command (the joint trajectory controller of ROS 2 Jazzy does
not even reject NaN), so one bad number in one joint drops the whole chunk, with the joint, the step, the
value and the limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from .joints import JointError

Chunk = NDArray[np.float32]

# Actions are float32, and so are their differences: two roundings of the larger value.
_ROUNDING = 2 * float(np.finfo(np.float32).eps)


class FaultCode(IntEnum):
    """Why a chunk is not published. The numbers are stable, so that a message may carry them."""

    SHAPE = 1
    NOT_FINITE = 2
    LIMIT = 3
    FIRST_STEP = 4
    STEP = 5


@dataclass(frozen=True, slots=True)
class ChunkFault:
    """The first fault of a chunk. `joint` is empty and the numbers are NaN or -1 where they do not apply."""

    code: FaultCode
    text: str
    joint: str = ""
    step: int = -1
    value: float = math.nan
    limit: float = math.nan


class ChunkLimits:
    """What each joint may do, in the order in which joints are published.

    Args:
        joint_names: the published joints.
        positions: lowest and highest position of a joint, radians or metres; a joint without an entry has no
            limit.
        max_first_step: largest distance from the measured position to step 0: one number for all joints, or
            one by joint; infinity, or no entry, means no check.
        max_step: largest distance from one step to the next, likewise.

    Raises:
        JointError: a limit for a joint that is not published.
        ValueError: a limit that is NaN, not positive, or upside down.
    """

    def __init__(
        self,
        joint_names: Sequence[str],
        positions: Mapping[str, tuple[float, float]] | None = None,
        max_first_step: float | Mapping[str, float] = math.inf,
        max_step: float | Mapping[str, float] = math.inf,
    ) -> None:
        self.joint_names = tuple(joint_names)
        bounds = positions or {}
        _refuse_unknown("position limits", bounds, self.joint_names)
        for name, (lower, upper) in bounds.items():
            if not lower < upper:
                raise ValueError(f"position limits of '{name}' are {lower} and {upper}; expected lower < upper")
        # In float32, so that an action clipped to a limit is on it and not a rounding error beyond.
        self.lower = np.array([bounds.get(name, (-math.inf, 0.0))[0] for name in self.joint_names], np.float32)
        self.upper = np.array([bounds.get(name, (0.0, math.inf))[1] for name in self.joint_names], np.float32)
        self.max_first_step = _by_joint("max_first_step", max_first_step, self.joint_names)
        self.max_step = _by_joint("max_step", max_step, self.joint_names)

    @property
    def needs_measured(self) -> bool:
        """True if some joint's first step is limited, so that a chunk cannot be judged without a measured
        state."""
        return bool(np.isfinite(self.max_first_step).any())


def check_chunk(
    chunk: Chunk, steps: int, limits: ChunkLimits, measured: NDArray[np.float32] | None
) -> ChunkFault | None:
    """Judge a whole chunk.

    Args:
        chunk: float32[steps, joints], absolute positions by published joint, radians or metres.
        steps: rows that it must have.
        limits: of the same joints.
        measured: float32[joints], positions that the observation measured; None only if `limits` do not need
            them.

    Returns:
        None if all of it may be published, else the first fault: by kind (shape, finite, limits, first step,
        steps), then by step, then by joint.

    Raises:
        ValueError: `limits` need a measured state and there is none.
    """
    shape_fault = _check_shape(chunk, steps, limits)
    if shape_fault is not None:
        return shape_fault
    return (
        _check_finite(chunk, limits)
        or _check_positions(chunk, limits)
        or _check_first_step(chunk, limits, measured)
        or _check_steps(chunk, limits)
    )


def hold_chunk(measured: NDArray[np.float32], steps: int) -> Chunk:
    """float32[steps, joints] that repeats the measured positions: a robot that follows it stays where it
    is."""
    return np.ascontiguousarray(np.broadcast_to(measured.astype(np.float32), (steps, len(measured))))


def _check_shape(chunk: Chunk, steps: int, limits: ChunkLimits) -> ChunkFault | None:
    expected = (steps, len(limits.joint_names))
    if chunk.shape == expected:
        return None
    return ChunkFault(
        FaultCode.SHAPE, f"chunk has shape {list(chunk.shape)}, expected {list(expected)} (steps, joints)"
    )


def _check_finite(chunk: Chunk, limits: ChunkLimits) -> ChunkFault | None:
    where = _first(~np.isfinite(chunk))
    if where is None:
        return None
    joint, value = limits.joint_names[where[1]], float(chunk[where])
    text = f"{_place(joint, where[0])}: the policy's output is {value}, expected a finite number"
    return ChunkFault(FaultCode.NOT_FINITE, text, joint, where[0], value)


def _check_positions(chunk: Chunk, limits: ChunkLimits) -> ChunkFault | None:
    where = _first((chunk < limits.lower) | (chunk > limits.upper))
    if where is None:
        return None
    step, column = where
    value = float(chunk[where])
    below = value < limits.lower[column]
    limit = float(limits.lower[column] if below else limits.upper[column])
    what = f"position {value:.6g} is {'below the lower' if below else 'above the upper'} limit {limit:.6g}"
    return _fault(FaultCode.LIMIT, limits.joint_names[column], step, value, limit, what)


def _check_first_step(chunk: Chunk, limits: ChunkLimits, measured: NDArray[np.float32] | None) -> ChunkFault | None:
    if not limits.needs_measured:
        return None
    if measured is None or measured.shape != chunk.shape[1:]:
        found = "none" if measured is None else f"shape {list(measured.shape)}"
        raise ValueError(f"max_first_step needs a measured position of {chunk.shape[1]} joints, got {found}")
    where = _first(_too_far(chunk[:1], measured[np.newaxis], limits.max_first_step))
    if where is None:
        return None
    column = where[1]
    value, limit = float(chunk[0, column]), float(limits.max_first_step[column])
    start = float(measured[column])
    distance = abs(value - start)
    what = f"position {value:.6g} is {distance:.6g} from the measured {start:.6g}, limit {limit:.6g}"
    return _fault(FaultCode.FIRST_STEP, limits.joint_names[column], 0, value, limit, what)


def _check_steps(chunk: Chunk, limits: ChunkLimits) -> ChunkFault | None:
    where = _first(_too_far(chunk[1:], chunk[:-1], limits.max_step))
    if where is None:
        return None
    step, column = where[0] + 1, where[1]
    value, before, limit = (
        float(chunk[step, column]),
        float(chunk[step - 1, column]),
        float(limits.max_step[column]),
    )
    distance = abs(value - before)
    what = f"position {value:.6g} is {distance:.6g} from step {step - 1}, limit {limit:.6g}"
    return _fault(FaultCode.STEP, limits.joint_names[column], step, value, limit, what)


def _too_far(positions: Chunk, before: Chunk, limit: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Where `positions` are farther from `before` than `limit`; not finite counts as too far."""
    new, old = positions.astype(np.float64), before.astype(np.float64)
    allowed = limit + _ROUNDING * np.maximum(np.abs(new), np.abs(old))
    return np.isfinite(limit) & ~(np.abs(new - old) <= allowed)


def _first(mask: NDArray[np.bool_]) -> tuple[int, int] | None:
    """The first true (row, column), row by row."""
    if not mask.any():
        return None
    row, column = divmod(int(mask.argmax()), mask.shape[1])
    return row, column


def _fault(code: FaultCode, joint: str, step: int, value: float, limit: float, what: str) -> ChunkFault:
    return ChunkFault(code, f"{_place(joint, step)}: {what}", joint, step, value, limit)


def _place(joint: str, step: int) -> str:
    return f"joint '{joint}' at step {step}"


def _by_joint(what: str, limit: float | Mapping[str, float], joint_names: tuple[str, ...]) -> NDArray[np.float64]:
    """float64[joints] from one number for all, or from one a joint."""
    by_name = limit if isinstance(limit, Mapping) else dict.fromkeys(joint_names, limit)
    _refuse_unknown(what, by_name, joint_names)
    for name, value in by_name.items():
        if not value > 0:
            raise ValueError(f"{what} of '{name}' is {value}; expected a positive number, or infinity for no check")
    return np.array([by_name.get(name, math.inf) for name in joint_names], np.float64)


def _refuse_unknown(what: str, by_name: Mapping[str, object], joint_names: tuple[str, ...]) -> None:
    unknown = [name for name in by_name if name not in joint_names]
    if unknown:
        raise JointError(
            f"{what} name {unknown}, which are not published; the published joints are {list(joint_names)}"
        )
