"""Our policy under measurement: filled once, then decided with again and again, whole or in pieces."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...engine.graphs import Executable, capture
from ...engine.windows import WindowPath
from ...policies import PolicyRunner
from ...policies.pi05 import BUILD_PARTS, Pi05Policy, build
from ...policies.pi05.plan import image_buffer
from ...policies.pixels import PixelOrder
from ...policies.runner import PARTS as INFER_PARTS
from ..errors import MeasureError
from ..rounds import Candidate
from ..trace import Span, traced
from .checkpoint import cut, default_settings
from .observations import Observation, Pixels, frame, instruction_of_length

STARTS = (*BUILD_PARTS, "session", "decision")
"""Parts of a start: those of `build`; arena and capture; the first decision."""
FRAME_SIZE = (480, 640)  # height, width
PARTS = ("vision", "prefix", "expert")
CALL_PARTS = ("ingest", "upload", *INFER_PARTS, "replay", "fetch", "unnormalise")
"""Parts of a whole call by the host's clock; `upload` and `replay` end when the device has finished, the others when
their work is done or enqueued by the host."""


@dataclass(frozen=True)
class Case:
    """One configuration to measure; None leaves a number as the checkpoint has it."""

    views: int | None = None
    chunk: int | None = None
    tokens: int | None = None

    def settings(self, given: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        """Settings of this case. A checkpoint is cut to it in `folder`; a seeded preset is simply told."""
        settings = dict(given)
        if self.tokens is not None:
            settings["prompt_buckets"] = [self.tokens]
        checkpoint = settings.get("checkpoint")
        if checkpoint:
            source = cut(Path(str(checkpoint)), folder, views=self.views, chunk=self.chunk)
            return {"preset": "pi05", **default_settings(source), **settings, "checkpoint": str(source)}
        changes = {} if self.chunk is None else {"chunk": self.chunk}
        return settings | changes


class _Laps:
    """A clock that is told at the end of each part; `seconds` is what each one took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def __call__(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part], self._last = now - self._last, now


class Subject:
    """A runner with one observation in its windows and one instruction of the longest prompt's exact length.

    Args:
        settings: of the policy.
        pictures: photographs that its cameras show.
        seed: of noise and crops.
        policy: one that was built of the same settings already; by default it is built here.
        windows: how windows reach the stages; by default as suits the device.

    `first_action_s` is the time from the beginning of loading to the first actions on the host, and `start_s` what of
    it each of STARTS took, those of `build` only where no policy was given; `windows` is how windows reach the stages.
    """

    def __init__(
        self, settings: Mapping[str, Any], device: str, pictures: list[Pixels], seed: int = 0, *,
        policy: Pi05Policy | None = None, windows: WindowPath | None = None,
    ) -> None:  # fmt: skip
        lap = _Laps()
        self.policy: Pi05Policy = policy or build(settings, device, lap=lap)
        self.runner = PolicyRunner.start(self.policy, device, seed, windows=windows)
        lap("session")
        self.windows = str(self.runner.session.window_path(image_buffer(self.views[0])))
        self.device = torch.device(device)
        self.settings = dict(settings)
        generator = np.random.default_rng(seed)
        height, width = _frame_size(self.policy)
        self.frames = [frame(pictures[i % len(pictures)], (height, width), generator) for i in range(len(self.views))]
        self.state = np.zeros(len(self.policy.state_names), np.float32)
        bucket = self.policy.config.prompt_buckets[-1]
        self.runner.set_instruction(instruction_of_length(self.policy, self.state, bucket))
        self.decide()
        lap("decision")
        self.start_s = lap.seconds
        self.first_action_s = sum(lap.seconds.values())
        self._tokens = self.runner.session.read("tokens")

    @property
    def views(self) -> tuple[str, ...]:
        """Camera views."""
        return self.policy.views

    @property
    def tokens(self) -> int:
        """Tokens of the prompt, which is also how many it was captured for."""
        return self.policy.config.prompt_buckets[-1]

    @property
    def stages(self) -> tuple[str, ...]:
        """Stages of one decision with an unchanged instruction, in their order."""
        return tuple(s.name for s in self.policy.contract.order if s.name not in ("checkpoint", "prompt"))

    def decide(self) -> NDArray[np.float32]:
        """One whole decision: image bytes on the host to actions on the host."""
        self._ingest()
        return self.runner.decide().actions

    def _ingest(self) -> None:
        for view, pixels in zip(self.views, self.frames, strict=True):
            self.runner.set_image(view, pixels, PixelOrder.RGB)
        self.runner.set_state(self.state)

    def decide_in_parts(self, lap: Callable[[], None]) -> None:
        """What `decide` does, with a lap at the end of each of CALL_PARTS.

        To tell uploads and replay apart it waits for the device where `decide` goes on.
        """
        self._ingest()
        lap()
        self._finish()
        lap()
        self.runner.infer(lap)
        self._finish()
        lap()
        rows = self.runner.session.read("actions")
        lap()
        self.policy.processor.actions(rows, self.state)
        lap()

    def _finish(self) -> None:
        """Wait until the device has done everything that was enqueued."""
        device = self.runner.session.device
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def replay(self) -> None:
        """Replay the stages of one decision on what is in the windows."""
        for stage in self.stages:
            self.runner.session.replay(stage)

    def rebuild(self) -> None:
        """A decision that reuses nothing: checkpoint and prompt stages are replayed too."""
        session = self.runner.session
        session.replay("checkpoint")
        session.fill("tokens", self._tokens)
        session.replay("prompt")
        self.replay()

    def actions(self) -> NDArray[np.float32]:
        """float32[chunk, padded width] of the last replay, in the model's units."""
        return self.runner.session.read("actions")

    def observation(self) -> Observation:
        """What is in the windows, for another implementation."""
        session = self.runner.session
        return Observation(
            images=dict(zip(self.views, self.frames, strict=True)),
            tokens=self._tokens[self._tokens >= 0],
            noise=session.read("noise"),
        )

    def parts(self) -> Candidate:
        """Vision, prefix and expert one after the other, each as its own graph, with a lap at the end of each."""
        session = self.runner.session
        variant = self.policy.contract.variant(session.variant)
        if tuple(self.policy.parts) != PARTS:
            raise MeasureError(f"the policy's parts are {', '.join(self.policy.parts)}, expected {', '.join(PARTS)}")
        graphs = [capture(body, session.arena, variant, session.device) for body in self.policy.parts.values()]
        return Candidate("parts", lambda lap: _replay_all(graphs, lap), laps=PARTS)

    def trace(self) -> list[Span]:
        """Kernels of one decision."""
        self.replay()
        return traced(self.replay, self.runner.session.device)

    def close(self) -> None:
        """Release memory and graphs."""
        self.runner.close()


def _replay_all(graphs: list[Executable], lap: Callable[[], None]) -> None:
    for graph in graphs:
        graph.replay()
        lap()


def _frame_size(policy: Pi05Policy) -> tuple[int, int]:
    height, width = FRAME_SIZE
    return FRAME_SIZE if height * width <= policy.max_pixels else (32, 32)
