"""The runner: one policy and one session, driven decision by decision in the robot's own terms."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite

import numpy as np

from ..engine import CapsuleStore, Session, WindowPath, memory_refusals, resolve_device
from ..ops.region_copy import region_copy
from ..ops.requirements import require_kernels
from .base import Policy, PolicyError
from .pixels import CHANNELS, PixelOrder, copy_pixels

PARTS = ("prompt", "context", "noise", "action")
"""Parts of `PolicyRunner.infer`, in their order. On a GPU they end when their work is enqueued."""


def _no_lap() -> None:
    """Nobody measures."""


@dataclass(frozen=True)
class Decision:
    """One chunk of actions and what it cost.

    `actions` is float32[chunk, len(action_names)] in the robot's units. `seconds` covers prompt, replay and
    conversion; `bytes_copied` counts what went into image windows since the decision before.
    """

    actions: np.ndarray
    replayed: tuple[str, ...]
    prompt: str
    seconds: float
    bytes_copied: int


class PolicyRunner:
    """Turns frames, states and an instruction into chunks.

    Args:
        policy: the model.
        session: built on `policy.contract` and `policy.bodies`, not yet configured.
    """

    def __init__(self, policy: Policy, session: Session) -> None:
        self.policy = policy
        self.session = session
        self._state: np.ndarray | None = None
        self._formats = [(0, 0, 0, 0)] * len(policy.views)
        self._sent_formats = list(self._formats)
        self._bytes_copied = 0

    @classmethod
    def start(
        cls,
        policy: Policy,
        device: str = "cpu",
        seed: int = 0,
        capsules: CapsuleStore | None = None,
        windows: WindowPath | None = None,
    ) -> PolicyRunner:
        """A configured runner: session built, STATIC buffers prepared, every stage captured.

        `capsules` is where the session's snapshots go and `windows` how its windows reach the stages, as in `Session`.
        """
        target = resolve_device(device)
        require_kernels(target)
        with memory_refusals(target):
            session = Session(policy.contract, policy.bodies, device, seed, capsules, region_copy(device), windows)
            policy.prepare(session)
            session.configure()
        return cls(policy, session)

    def set_image(self, view: str, pixels: np.ndarray, order: PixelOrder) -> int:
        """Copy one frame into its window, once, without converting it.

        Args:
            pixels: uint8[height, width, channels]; may be a strided view into padded rows.
            order: meaning of the channels.

        Returns:
            Bytes copied: height × width × channels.

        Raises:
            PolicyError: unknown view, wrong dtype or shape, or more pixels than the window holds.
        """
        index = self._view_index(view)
        height, width, channels = self._checked_shape(view, pixels, order)
        with self.session.window(f"image.{view}", rows=pixels.size) as window:
            copied = copy_pixels(window, pixels)
        self._formats[index] = height, width, channels, int(order)
        self._bytes_copied += copied
        return copied

    def set_state(self, state: np.ndarray) -> None:
        """Remember the robot's state: float32[len(state_names)], in the order of `policy.state_names`."""
        expected = (len(self.policy.state_names),)
        if state.shape != expected:
            raise PolicyError(
                f"state has shape {list(state.shape)}, policy '{self.policy.name}' expects {list(expected)}"
            )
        if not all(map(isfinite, state.tolist())):  # so few that numpy's way takes longer, above all in cold caches
            name = self.policy.state_names[int(np.flatnonzero(~np.isfinite(state))[0])]
            raise PolicyError(f"state of '{name}' is not finite; refusing to act on it")
        self._state = state.astype(np.float32)

    @property
    def instruction(self) -> str:
        """What the robot is to do. It is a note of the session, so a restored capsule brings it back."""
        return self.session.notes.get("instruction", "")

    def set_instruction(self, instruction: str) -> None:
        """Say what the robot is to do; it becomes the prompt at the next decision."""
        self.session.notes["instruction"] = instruction

    def decide(self) -> Decision:
        """Replay what is stale, with fresh noise, and return the chunk."""
        start = time.perf_counter()
        prompt, replayed = self.infer()
        actions = self.policy.actions(self.session, self._state)
        copied, self._bytes_copied = self._bytes_copied, 0
        return Decision(actions, replayed, prompt, time.perf_counter() - start, copied)

    def infer(self, lap: Callable[[], None] = _no_lap) -> tuple[str, tuple[str, ...]]:
        """Everything of a decision but reading its result: the prompt's text, and the stages that were replayed.

        A GPU works on the context while the noise is drawn, which only the stages behind it need.

        Args:
            lap: called at the end of each of `PARTS`, by whoever measures where the time goes.
        """
        prompt = self.policy.write_prompt(self.session, self.instruction, self._state)
        self._send_formats()
        lap()
        replayed = self.session.act(apart_from="noise")
        lap()
        self.session.draw("noise")
        lap()
        replayed += self.session.act()
        lap()
        return prompt, replayed

    def close(self) -> None:
        """Release the session's memory and graphs."""
        self.session.close()

    def _view_index(self, view: str) -> int:
        if view not in self.policy.views:
            known = ", ".join(self.policy.views)
            raise PolicyError(f"unknown view '{view}'; policy '{self.policy.name}' sees: {known}")
        return self.policy.views.index(view)

    def _checked_shape(self, view: str, pixels: np.ndarray, order: PixelOrder) -> tuple[int, int, int]:
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] not in CHANNELS[order] or not pixels.size:
            raise PolicyError(
                f"view '{view}': got {pixels.dtype}{list(pixels.shape)}, expected uint8[height, width, channels] with "
                f"{' or '.join(map(str, CHANNELS[order]))} channels for {order.name}"
            )
        height, width, channels = pixels.shape
        if height * width > self.policy.max_pixels:
            raise PolicyError(
                f"view '{view}': {width}x{height} is more than the {self.policy.max_pixels} pixels of its window; "
                "raise max_pixels or lower the camera's resolution"
            )
        return height, width, channels

    def _send_formats(self) -> None:
        missing = "image_format" in self.session.unfilled  # never sent, or a restore left it without its content
        if missing or self._sent_formats != self._formats:
            self.session.fill("image_format", np.array(self._formats, np.int32))
            self._sent_formats = list(self._formats)
