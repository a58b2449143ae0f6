"""Observations to compare and to time with: real photographs, prompts of several lengths, and noise."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from ...policies import PromptError
from ...policies.pi05.config import Pi05Config
from ...policies.pi05.policy import Pi05Policy
from ...policies.pi05.prompt import prompt_text
from ..errors import MeasureError

Pixels = NDArray[np.uint8]

INSTRUCTIONS = (
    "pick up the red cup",
    "open the top drawer and put the screwdriver inside",
    "fold the towel",
    "wipe the table slowly, then put the sponge into the sink",
    "hand me the banana",
    "move the small blue block to the left of the bowl",
)
_PHOTOGRAPHS = ("astronaut.png", "coffee.png", "chelsea.png", "rocket.jpg", "motorcycle_left.png", "ihc.png")
_SIZES = ((480, 640), (720, 1280), (224, 224), (360, 270), (600, 800), (96, 321))  # height, width of a camera frame


@dataclass(frozen=True)
class Observation:
    """Everything that one decision takes.

    Attributes:
        images: uint8[height, width, 3] (RGB) by view, in the model's order.
        tokens: int32[length], no padding.
        noise: float32[chunk, padded width].
    """

    images: dict[str, Pixels]
    tokens: NDArray[np.int32]
    noise: NDArray[np.float32]


def photographs(files: Sequence[Path] = ()) -> list[Pixels]:
    """uint8[height, width, 3] (RGB) of `files`, or of the photographs that ship with scikit-image.

    Raises MeasureError if a file is no image, or if there are neither files nor scikit-image.
    """
    return [_read(path) for path in files or _shipped()]


def _shipped() -> list[Path]:
    spec = importlib.util.find_spec("skimage")
    if spec is None or not spec.submodule_search_locations:
        raise MeasureError("there are no photographs here: install scikit-image, or give files with --images")
    folder = Path(spec.submodule_search_locations[0]) / "data"
    return [folder / name for name in _PHOTOGRAPHS]


def _read(path: Path) -> Pixels:
    pixels = cv2.imread(str(path), cv2.IMREAD_COLOR)
    if pixels is None:
        raise MeasureError(f"'{path}' is not an image that OpenCV reads; give PNG or JPEG files with --images")
    return np.ascontiguousarray(pixels[:, :, ::-1], dtype=np.uint8)


def frame(photograph: Pixels, size: tuple[int, int], generator: np.random.Generator) -> Pixels:
    """A random crop of `photograph` of the shape of `size`, resized to `size` (height, width)."""
    rows, columns = photograph.shape[:2]
    height, width = size
    largest = min(rows / height, columns / width)
    scale = largest * generator.uniform(0.6, 1.0)
    tall, wide = max(1, int(height * scale)), max(1, int(width * scale))
    top, left = generator.integers(0, rows - tall + 1), generator.integers(0, columns - wide + 1)
    crop = photograph[top : top + tall, left : left + wide]
    interpolation = cv2.INTER_AREA if scale > 1 else cv2.INTER_CUBIC
    return np.ascontiguousarray(cv2.resize(crop, (width, height), interpolation=interpolation), dtype=np.uint8)


def make_observations(
    policy: Pi05Policy, count: int, pictures: Sequence[Pixels], seed: int = 0, max_pixels: int | None = None
) -> list[Observation]:
    """`count` different observations for the views of `policy`.

    The tokens of three in four are an instruction with a random state, as the policy's own processor writes them; those
    of the fourth are drawn from the whole vocabulary, at a random length up to the longest prompt.
    """
    generator = np.random.default_rng(seed)
    allowed = max_pixels or policy.max_pixels
    sizes = [size for size in _SIZES if size[0] * size[1] <= allowed] or [(32, 32)]
    config = policy.config

    def picture(index: int) -> Pixels:
        return frame(pictures[index % len(pictures)], sizes[index % len(sizes)], generator)

    return [
        Observation(
            images={view: picture(len(config.views) * index + place) for place, view in enumerate(config.views)},
            tokens=_tokens(policy, index, generator),
            noise=generator.standard_normal((config.chunk, config.padded_width), np.float32),
        )
        for index in range(count)
    ]


def _tokens(policy: Pi05Policy, index: int, generator: np.random.Generator) -> NDArray[np.int32]:
    if index % 4 == 3:
        longest = policy.config.prompt_buckets[-1]
        return random_tokens(policy.config, int(generator.integers(longest // 2, longest + 1)), generator)
    config = policy.config
    state = generator.uniform(-1, 1, len(config.state_names)) if config.state_in_prompt else None
    tokens = policy.processor.tokens(prompt_text(INSTRUCTIONS[index % len(INSTRUCTIONS)], state))
    return tokens[tokens >= 0]


def random_tokens(config: Pi05Config, length: int, generator: np.random.Generator) -> NDArray[np.int32]:
    """int32[length] ids from the whole vocabulary."""
    return generator.integers(0, config.vocabulary, length, np.int32)


def instruction_of_length(policy: Pi05Policy, state: NDArray[np.float32], tokens: int) -> str:
    """An instruction whose prompt, with `state` in the robot's units, has exactly `tokens` tokens.

    Raises MeasureError if the tokenizer allows none.
    """

    def length(text: str) -> int:
        try:
            return int((policy.processor.tokens(policy.processor.text(text, state)) >= 0).sum())
        except PromptError:  # longer than the longest prompt
            return tokens + 1

    text = "pick up"
    for word in (" the red cup and then", " a", " I", ".", "!"):
        while length(text + word) <= tokens:
            text += word
        if length(text) == tokens:
            return text
    raise MeasureError(
        f"no instruction gives a prompt of exactly {tokens} tokens (the nearest has {length(text)}); "
        "choose another number of tokens"
    )
