"""The runner turns frames, states and instructions into chunks, and copies each frame once."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch

from flashrt_ros.contract import (
    Buffer,
    Contract,
    DType,
    Identity,
    Rate,
    Role,
    Stage,
    Variant,
)
from flashrt_ros.engine import Session
from flashrt_ros.policies import (
    PolicyError,
    PolicyRunner,
    PromptError,
    SettingsError,
    build_policy,
)
from flashrt_ros.policies.pixels import PixelOrder

MAX_PIXELS = 12


class MeanPolicy:
    """A complete policy: an action is the sum of all live pixel bytes, the prompt's length and the noise."""

    name = "mean"
    checkpoint = "preset:mean"
    views = ("front", "wrist")
    max_pixels = MAX_PIXELS
    state_names = ("a", "b")
    action_names = ("a", "b")
    chunk = 3
    action_dt = 0.1
    kernel_reports = ()
    fidelity = "16-bit, nothing to pass"

    def __init__(self) -> None:
        images = tuple(
            Buffer(
                f"image.{v}",
                (MAX_PIXELS * 4,),
                DType.UINT8,
                Role.SWAP,
                Rate.OBSERVATION,
            )
            for v in self.views
        )
        others = (
            Buffer("image_format", (2, 4), DType.INT32, Role.SWAP, Rate.OBSERVATION),
            Buffer("length", (1,), DType.INT32, Role.SWAP, Rate.PROMPT),
            Buffer("noise", (3, 2), DType.FLOAT32, Role.SWAP, Rate.OBSERVATION),
            Buffer("actions", (3, 2), DType.FLOAT32, Role.SWAP),
        )
        reads = tuple(b.name for b in (*images, *others[:3]))
        stages = (Stage("sum", Rate.OBSERVATION, reads, ("actions",)),)
        self.contract = Contract("mean", (*images, *others), stages, Identity("mean", ""))
        self.bodies = {"sum": self._sum}

    def _sum(self, buffers: Mapping[str, torch.Tensor], variant: Variant) -> None:
        total = torch.zeros(())
        for index, view in enumerate(self.views):
            height, width, channels, _ = buffers["image_format"][index]
            live = torch.arange(MAX_PIXELS * 4) < height * width * channels
            total = total + (buffers[f"image.{view}"] * live).sum()
        buffers["actions"].copy_(buffers["noise"] + total + buffers["length"])

    def prepare(self, session: Session) -> None: ...

    def write_prompt(self, session: Session, instruction: str, state: np.ndarray | None) -> str:
        if not instruction:
            raise PromptError("the instruction is empty")
        if session.versions["length"] == 0 or session.read("length")[0] != len(instruction):
            session.fill("length", np.array([len(instruction)], np.int32))
        return instruction

    def actions(self, session: Session, state: np.ndarray | None) -> np.ndarray:
        return session.read("actions")


@pytest.fixture
def runner() -> PolicyRunner:
    runner = PolicyRunner.start(MeanPolicy(), seed=1)
    runner.set_state(np.zeros(2, np.float32))
    runner.set_instruction("go")
    return runner


def frame(value: int, height: int = 2, width: int = 3, channels: int = 3) -> np.ndarray:
    return np.full((height, width, channels), value, np.uint8)


def test_a_decision_uses_live_pixels_only_and_counts_its_copies(
    runner: PolicyRunner,
) -> None:
    assert runner.set_image("front", frame(1, 3, 4), PixelOrder.RGB) == 36
    runner.set_image("wrist", frame(2), PixelOrder.BGR)
    first = runner.decide()
    assert first.bytes_copied == 36 + 18
    np.testing.assert_allclose(first.actions, runner.session.read("noise") + 36 + 36 + 2, rtol=1e-6)
    runner.set_image("front", frame(1), PixelOrder.RGB)  # smaller than before: the old tail must not count
    second = runner.decide()
    assert second.bytes_copied == 18
    np.testing.assert_allclose(second.actions, runner.session.read("noise") + 18 + 36 + 2, rtol=1e-6)


def test_a_strided_view_is_copied_without_its_padding(runner: PolicyRunner) -> None:
    padded = np.full((2, 4, 3), 9, np.uint8)
    view = padded[:, :3]
    runner.set_image("front", view, PixelOrder.RGB)
    np.testing.assert_array_equal(runner.session.read("image.front")[:18], 9)
    np.testing.assert_array_equal(runner.session.read("image.front")[18:], 0)


def test_formats_are_sent_once_until_they_change(runner: PolicyRunner) -> None:
    for view in ("front", "wrist"):
        runner.set_image(view, frame(1), PixelOrder.RGB)
    runner.decide()
    runner.set_image("front", frame(3), PixelOrder.RGB)
    runner.decide()
    assert runner.session.versions["image_format"] == 1
    runner.set_image("front", frame(3), PixelOrder.BGR)
    runner.decide()
    assert runner.session.versions["image_format"] == 2


@pytest.mark.parametrize(
    ("view", "pixels", "order", "message"),
    [
        (
            "top",
            frame(1),
            PixelOrder.RGB,
            "unknown view 'top'; policy 'mean' sees: front, wrist",
        ),
        ("front", frame(1).astype(np.float32), PixelOrder.RGB, "got float32"),
        ("front", frame(1, channels=1), PixelOrder.RGB, "3 or 4 channels for RGB"),
        ("front", frame(1), PixelOrder.MONO, "1 channels for MONO"),
        (
            "front",
            frame(1)[0],
            PixelOrder.RGB,
            "expected uint8.height, width, channels.",
        ),
        ("front", frame(1, 0, 4), PixelOrder.RGB, "expected uint8"),
        ("front", frame(1, 13, 1), PixelOrder.RGB, "1x13 is more than the 12 pixels"),
    ],
)
def test_frames_that_do_not_fit_are_refused_and_change_nothing(
    runner: PolicyRunner, view: str, pixels: np.ndarray, order: PixelOrder, message: str
) -> None:
    before = runner.session.versions
    with pytest.raises(PolicyError, match=message):
        runner.set_image(view, pixels, order)
    assert runner.session.versions == before


def test_states_of_a_wrong_size_or_not_finite_are_refused(runner: PolicyRunner) -> None:
    with pytest.raises(PolicyError, match=r"shape \[3\], policy 'mean' expects \[2\]"):
        runner.set_state(np.zeros(3, np.float32))
    with pytest.raises(PolicyError, match="state of 'b' is not finite"):
        runner.set_state(np.array([0, np.nan], np.float32))


def test_an_unusable_instruction_leaves_the_runner_working(
    runner: PolicyRunner,
) -> None:
    for view in ("front", "wrist"):
        runner.set_image(view, frame(1), PixelOrder.RGB)
    runner.set_instruction("")
    with pytest.raises(PromptError):
        runner.decide()
    runner.set_instruction("go")
    assert runner.decide().prompt == "go"


def test_a_restored_runner_follows_the_instruction_of_the_capsule(runner: PolicyRunner) -> None:
    def see(value: int) -> None:
        for view in ("front", "wrist"):
            runner.set_image(view, frame(value), PixelOrder.RGB)

    see(1)
    runner.decide()
    runner.session.snapshot("go")
    see(2)
    uninterrupted = runner.decide()
    runner.set_instruction("a longer one")
    runner.set_image("front", frame(9, 3, 4), PixelOrder.BGR)
    runner.decide()
    runner.session.restore("go")
    assert runner.instruction == "go"
    see(2)
    again = runner.decide()
    assert again.prompt == "go"
    np.testing.assert_array_equal(again.actions, uninterrupted.actions)


def test_unknown_policies_are_refused_with_the_known_ones() -> None:
    with pytest.raises(SettingsError, match="unknown policy 'nope'; this installation has: "):
        build_policy("nope", {})
