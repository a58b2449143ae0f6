"""The tiny preset made smaller still, and sessions of it that have decided."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashrt_ros.policies import PolicyRunner
from flashrt_ros.policies.pi05 import Pi05Policy, build
from flashrt_ros.policies.pixels import PixelOrder

SMALL: dict[str, Any] = {
    "preset": "pi05_tiny",
    "image_size": 28,
    "vision_layers": 1,
    "layers": 2,
    "steps": 3,
    "max_pixels": 64 * 64,
}
STATE = np.array([0.0, -0.5, 0.0, -2.0, 0.0, 1.5, 0.7, 0.02], np.float32)
INSTRUCTION = "pick up the red cup"


def small_policy(device: str = "cpu", **changes: Any) -> Pi05Policy:
    return build({**SMALL, **changes}, device)


def frame(seed: int, height: int = 48, width: int = 64) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def look(runner: PolicyRunner, seed: int = 0) -> None:
    """Fill every view, and the state."""
    for index, view in enumerate(runner.policy.views):
        runner.set_image(view, frame(10 * seed + index), PixelOrder.RGB)
    runner.set_state(STATE)


def started(device: str = "cpu", **changes: Any) -> PolicyRunner:
    """A runner that sees something and knows what to do."""
    runner = PolicyRunner.start(small_policy(device, **changes), device)
    look(runner)
    runner.set_instruction(INSTRUCTION)
    return runner
