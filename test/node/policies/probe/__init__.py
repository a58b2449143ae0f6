"""A policy whose every action tells something about what it was given, so that a test can read it off the chunk.

Each action is computed by its name:
- a joint of the state: its position plus `offset`, and `drift` a step;
- `<view>_0`, `<view>_1`, `<view>_2`: mean of red, green and blue over the view's live pixels;
- `log_<view>`: logarithm of that mean minus 100, which is NaN for a dark picture and -inf at exactly 100;
- `words`: number of words of the instruction;
- `noise`: the sampling noise;
- an empty name is padding, always 99.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
import torch

from flashrt_ros.contract import Buffer, Contract, DType, Identity, Rate, Role, Stage, Variant
from flashrt_ros.engine import Session, StageBody
from flashrt_ros.policies import CheckpointError, PromptError, SettingsError
from flashrt_ros.policies.pixels import PixelOrder
from test.node.latch import LATCH

MAX_WORDS = 20


@dataclass(frozen=True)
class ProbeConfig:
    """Settings of the probe.

    `delay` is how long one replay takes, `load_time` how long loading does (s); `checkpoint` is a file that must exist,
    if set; `broken` makes configure fail as a defect would, `break_on_white` a replay on a white picture.
    """

    views: tuple[str, ...] = ("front", "wrist")
    state_names: tuple[str, ...] = ("a", "b", "c")
    action_names: tuple[str, ...] = ("a", "b", "c")
    chunk: int = 4
    action_dt: float = 0.1
    max_pixels: int = 640 * 480
    offset: float = 0.0
    drift: float = 0.0
    delay: float = 0.0
    load_time: float = 0.0
    broken: bool = False
    break_on_white: bool = False
    checkpoint: str = ""


class ProbePolicy:
    """The policy; see the module's text."""

    name = "probe"
    kernel_reports = ()
    fidelity = "16-bit, nothing to pass"

    def __init__(self, config: ProbeConfig) -> None:
        self.config = config
        self.views, self.max_pixels = config.views, config.max_pixels
        self.state_names, self.action_names = config.state_names, config.action_names
        self.chunk, self.action_dt = config.chunk, config.action_dt
        self.checkpoint = config.checkpoint or "preset:probe"
        self.contract = _contract(config)
        self.bodies: Mapping[str, StageBody] = {"prompt": _prompt, "act": self._act}
        self._words = -1

    def prepare(self, session: Session) -> None:
        """Nothing is STATIC here."""

    def write_prompt(self, session: Session, instruction: str, state: np.ndarray | None) -> str:
        """Count words; the state goes into its own window."""
        words = len(instruction.split())
        if not 0 < words <= MAX_WORDS:
            raise PromptError(f"{words} words, expected 1 to {MAX_WORDS}; shorten the instruction")
        if words != self._words:
            session.fill("words", np.array([words], np.int32))
            self._words = words
        if state is not None:
            session.fill("state", state)
        return instruction

    def actions(self, session: Session, state: np.ndarray | None) -> np.ndarray:
        """float32[chunk, actions]."""
        return session.read("actions")

    def _act(self, buffers: Mapping[str, torch.Tensor], variant: Variant) -> None:
        if int(buffers["image_format"][0, 0]):  # not while configure captures
            time.sleep(self.config.delay)
            LATCH.pass_through()
            if self.config.break_on_white and bool(buffers[f"image.{self.views[0]}"][0] == 255):
                raise ArithmeticError("white")
        for column, action in enumerate(self.action_names):
            buffers["actions"][:, column] = self._column(action, buffers)

    def _column(self, action: str, buffers: Mapping[str, torch.Tensor]) -> torch.Tensor:
        steps = torch.arange(self.chunk, dtype=torch.float32)
        if action in self.state_names:
            position = buffers["state"][self.state_names.index(action)]
            return position + self.config.offset + self.config.drift * steps
        if not action:
            return torch.full((self.chunk,), 99.0)
        if action == "words":
            return buffers["length"].float().expand(self.chunk)
        if action == "noise":
            return buffers["noise"][:, 0]
        view, channel = (action[4:], None) if action.startswith("log_") else action.rsplit("_", 1)
        colours = _mean_colours(buffers, self.views.index(view), view)
        return (colours.mean() - 100).log() if channel is None else colours[int(channel)]


def build(settings: Mapping[str, object], device: str) -> ProbePolicy:
    """The probe with these settings; SettingsError for one that it does not have."""
    known = {field.name for field in fields(ProbeConfig)}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise SettingsError(f"unknown setting '{unknown[0]}'; known: {', '.join(sorted(known))}")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
    config = ProbeConfig(**values)  # type: ignore[arg-type]
    if config.checkpoint:
        try:
            open(config.checkpoint).close()
        except OSError as error:
            raise CheckpointError(f"checkpoint '{config.checkpoint}' cannot be read ({error.strerror})") from error
    if config.broken:
        raise ZeroDivisionError("a defect of the policy")
    time.sleep(config.load_time)
    return ProbePolicy(config)


def _contract(config: ProbeConfig) -> Contract:
    views, actions = config.views, (config.chunk, len(config.action_names))
    seen, told = Rate.OBSERVATION, Rate.PROMPT
    buffers = (
        *(Buffer(f"image.{view}", (config.max_pixels * 4,), DType.UINT8, Role.SWAP, seen) for view in views),
        Buffer("image_format", (len(views), 4), DType.INT32, Role.SWAP, seen),
        Buffer("state", (len(config.state_names),), DType.FLOAT32, Role.SWAP, seen),
        Buffer("words", (1,), DType.INT32, Role.SWAP, told),
        Buffer("noise", actions, DType.FLOAT32, Role.SWAP, seen),
        Buffer("length", (1,), DType.INT32, Role.STATIC),
        Buffer("actions", actions, DType.FLOAT32, Role.SWAP),
    )
    reads = (*(f"image.{view}" for view in views), "image_format", "state", "length", "noise")
    stages = (Stage("prompt", told, ("words",), ("length",)), Stage("act", seen, reads, ("actions",)))
    return Contract("probe", buffers, stages, Identity("probe", "", views=views, chunk=config.chunk))


def _prompt(buffers: Mapping[str, torch.Tensor], variant: Variant) -> None:
    buffers["length"].copy_(buffers["words"])


def _mean_colours(buffers: Mapping[str, torch.Tensor], index: int, view: str) -> torch.Tensor:
    """Mean of red, green and blue."""
    height, width, channels, order = (int(n) for n in buffers["image_format"][index])
    if not height:  # while configure captures
        return torch.zeros(3)
    live = buffers[f"image.{view}"][: height * width * channels].view(-1, channels).float()
    if order == PixelOrder.MONO:
        return live.mean().expand(3)
    means = live[:, :3].mean(0)
    return means.flip(0) if order == PixelOrder.BGR else means
