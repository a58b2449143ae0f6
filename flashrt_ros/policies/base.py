"""What every policy offers to the engine and to whoever runs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from ..contract import Contract
from ..engine import Session, StageBody
from ..ops.report import KernelReport


class PolicyError(ValueError):
    """A policy was described, loaded or used wrongly; the message says what, where and what to do."""


class SettingsError(PolicyError):
    """A setting is unknown, of the wrong type, or out of range."""


class CheckpointError(PolicyError):
    """A checkpoint is missing, corrupt, or not of this policy and configuration."""


class PromptError(PolicyError):
    """An instruction cannot become a prompt; the previous prompt stays in force."""


class Policy(Protocol):
    """One model, ready to run: its plan, the bodies of its stages, and the conversions at both ends.

    Windows by convention: `image.<view>` holds the raw pixels of a camera (uint8, `max_pixels` × 4 bytes at most),
    `image_format` one int32 row (height, width, channels, PixelOrder) a view, `noise` the seeded start of sampling.
    """

    @property
    def name(self) -> str:
        """Folder name under `flashrt_ros.policies`."""

    @property
    def checkpoint(self) -> str:
        """Path of the weights, or "preset:<name>" for seeded ones."""

    @property
    def contract(self) -> Contract:
        """The plan."""

    @property
    def bodies(self) -> Mapping[str, StageBody]:
        """One body for each stage of the plan."""

    @property
    def views(self) -> tuple[str, ...]:
        """Camera views, in the order of the `image_format` rows."""

    @property
    def max_pixels(self) -> int:
        """Largest height × width of a camera frame."""

    @property
    def state_names(self) -> tuple[str, ...]:
        """Joints of the state, in the policy's order."""

    @property
    def action_names(self) -> tuple[str, ...]:
        """Joints of an action, in the policy's order."""

    @property
    def kernel_reports(self) -> tuple[KernelReport, ...]:
        """What runs in which part, and why not the faster kernel; empty where nothing faster exists."""

    @property
    def fidelity(self) -> str:
        """What the fidelity gate of the precision tier found, in one sentence."""

    @property
    def chunk(self) -> int:
        """Actions in one chunk."""

    @property
    def action_dt(self) -> float:
        """Seconds between two actions."""

    def prepare(self, session: Session) -> None:
        """Fill STATIC buffers that no stage writes; called once, before `session.configure()`."""

    def write_prompt(self, session: Session, instruction: str, state: np.ndarray | None) -> str:
        """Make `instruction` (and `state`, where the prompt holds it) the prompt, if it is not already.

        Fills windows only when the text changed, so that an unchanged instruction costs nothing.

        Args:
            state: float32[len(state_names)] in the robot's units, or None where the policy ignores it.

        Returns:
            The prompt's text.

        Raises:
            PromptError: the text is empty or too long, or the state is needed and missing. Nothing was changed.
        """

    def actions(self, session: Session, state: np.ndarray | None) -> np.ndarray:
        """float32[chunk, len(action_names)]: the session's result in the robot's units, absolute."""
