"""What to do when the policy's chunks are refused again and again: nothing, hold still, or stop."""

from __future__ import annotations

from enum import Enum


class StallAction(Enum):
    """What the node must do now; the values are those of the `stall_policy` parameter."""

    NONE = "none"
    HOLD = "hold"
    STOP = "stop"


class StallPolicy:
    """Counts refused chunks in a row and asks for one action a stall.

    A stall begins with the refusal that makes the count reach `after`, and ends with the next published chunk
    of the policy. The action is asked for once, when it begins: `HOLD` means to publish one chunk that
    repeats the measured positions, `STOP` to deactivate the node, `NONE` to publish nothing and leave it to
    the controller.

    Args:
        action: what to ask for.
        after: refusals in a row, at least 1.

    Attributes: `stalls`, how many began since construction; `refused_in_a_row`.

    Raises:
        ValueError: `after` is below 1.
    """

    def __init__(self, action: StallAction, after: int) -> None:
        if after < 1:
            raise ValueError(f"a stall begins after {after} refusals; expected at least 1")
        self.action = action
        self.after = after
        self.stalls = 0
        self.refused_in_a_row = 0

    @property
    def stalled(self) -> bool:
        """True from the refusal that began a stall until the next published chunk."""
        return self.refused_in_a_row >= self.after

    def refused(self) -> StallAction:
        """Count one refused chunk; returns the action to take now."""
        self.refused_in_a_row += 1
        if self.refused_in_a_row != self.after:
            return StallAction.NONE
        self.stalls += 1
        return self.action

    def published(self) -> None:
        """Count one published chunk of the policy; a chunk that holds still is none."""
        self.refused_in_a_row = 0

    def reset(self) -> None:
        """Start anew at activation; `stalls` goes on."""
        self.refused_in_a_row = 0
