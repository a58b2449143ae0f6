"""Joints by name: from a JointState to a policy's state, and from a policy's action to the robot's joints.

Neither side may rely on the other's order. Drivers publish joints in the order of their URDF or
alphabetically, and a policy's action may be wider than the robot, padded to the width it was trained with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class JointError(ValueError):
    """Joint names or values that do not fit; the text names what each side has."""


class StateReader:
    """Picks named positions out of JointState messages.

    Args:
        names: the joints wanted, in the order wanted.
        wanted_by: who wants them, for the error text, as in `policy 'pi05'`.

    Raises:
        JointError: a name is wanted twice or is empty.
    """

    def __init__(self, names: Sequence[str], wanted_by: str) -> None:
        self.names = _checked_names(names, wanted_by)
        self._wanted_by = wanted_by
        self._known_names: tuple[str, ...] | None = None
        self._columns: NDArray[np.intp] = np.empty(0, np.intp)

    def read(self, names: tuple[str, ...], positions: NDArray[np.float64]) -> NDArray[np.float32]:
        """The wanted positions of one message.

        Args:
            names: the message's joints. Names that nobody wants are ignored: a robot has more joints than a
                policy.
            positions: float64[len(names)], in radians or metres.

        Returns:
            float32[len(self.names)], a new array.

        Raises:
            JointError: lengths differ, a joint is missing or listed twice, or a wanted position is NaN or
                infinite.
        """
        if len(positions) != len(names):
            raise JointError(f"joint state has {len(names)} names and {len(positions)} positions; expected one each")
        if names != self._known_names:
            self._columns = self._find_columns(names)
            self._known_names = names
        with np.errstate(over="ignore"):
            values = positions[self._columns].astype(np.float32)
        if not np.isfinite(values).all():
            column = int(np.flatnonzero(~np.isfinite(values))[0])
            value = positions[self._columns[column]]
            raise JointError(f"joint state gives '{self.names[column]}' the position {value}, which no joint can have")
        return values

    def _find_columns(self, names: tuple[str, ...]) -> NDArray[np.intp]:
        repeated = [name for name, count in Counter(names).items() if count > 1]
        if repeated:
            raise JointError(f"joint state lists {_quoted(repeated)} more than once, in {_quoted(names)}")
        missing = [name for name in self.names if name not in names]
        if missing:
            raise JointError(
                f"joint state lacks {_quoted(missing)}: {self._wanted_by} expects {_quoted(self.names)}, "
                f"the robot publishes {_quoted(names)}"
            )
        return np.array([names.index(name) for name in self.names], np.intp)


class ActionMap:
    """Picks the robot's joints out of a policy's action.

    Args:
        action_names: one name a column of the action; an empty name is padding.
        joint_names: the robot's joints, in the order in which chunks are published.

    Attributes: `joint_names`; `dropped`, the named columns that no joint takes, for the log.

    Raises:
        JointError: a joint that the policy does not drive, a repeated name, or no joint at all.
    """

    def __init__(self, action_names: Sequence[str], joint_names: Sequence[str]) -> None:
        columns = _checked_names([name for name in action_names if name], "the policy's action")
        self.joint_names = _checked_names(joint_names, "the robot's joint list")
        unknown = [name for name in self.joint_names if name not in columns]
        if unknown:
            raise JointError(
                f"the policy's action has no {_quoted(unknown)}: the robot expects {_quoted(self.joint_names)}, "
                f"the policy gives {_quoted(columns)}"
            )
        self.dropped = tuple(name for name in columns if name not in self.joint_names)
        self._width = len(action_names)
        self._columns = np.array([list(action_names).index(name) for name in self.joint_names], np.intp)

    def select(self, actions: NDArray[np.float32]) -> NDArray[np.float32]:
        """The robot's joints of a whole chunk.

        Args:
            actions: float32[chunk, len(action_names)].

        Returns:
            float32[chunk, len(joint_names)], contiguous.

        Raises:
            JointError: another shape.
        """
        if actions.ndim != 2 or actions.shape[1] != self._width:
            raise JointError(f"actions have shape {list(actions.shape)}, expected [chunk, {self._width}]")
        return np.ascontiguousarray(actions[:, self._columns])


def _checked_names(names: Sequence[str], owner: str) -> tuple[str, ...]:
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise JointError(f"{owner} names {_quoted(repeated)} more than once, in {_quoted(names)}")
    if not names or "" in names:
        raise JointError(f"{owner} has {'an empty name' if names else 'no names'}, in [{_quoted(names)}]")
    return tuple(names)


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
