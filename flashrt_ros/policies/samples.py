"""Moments that a robot saw, in its own terms, for calibrating and verifying: read from a folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from .base import Policy, PolicyError

INDEX = "observations.jsonl"


class SampleError(PolicyError):
    """An observation is missing, unreadable, or not of this policy; the message says which one."""


@dataclass(frozen=True)
class Sample:
    """One moment.

    Attributes:
        images: uint8[height, width, 3] (RGB) by view.
        state: float32[state names] in the robot's units; None if it was not recorded.
        instruction: what the robot was to do.
        where: of the sample, for messages.
    """

    images: dict[str, NDArray[np.uint8]]
    state: NDArray[np.float32] | None
    instruction: str
    where: str


def read_folder(folder: Path, policy: Policy, limit: int) -> list[Sample]:
    """The first `limit` observations of a folder.

    Its `observations.jsonl` has one JSON object a line: `images` (view → file, relative to the folder), `state`
    (numbers in the order of the policy's state names; may be left out where the policy ignores it), `instruction`.

    Raises:
        SampleError: what is wrong, with file and line.
    """
    index = folder / INDEX
    try:
        lines = index.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SampleError(f"cannot read '{index}': {error}; expected one JSON object a line") from None
    samples = [_sample(folder, line, f"{index}:{number}") for number, line in _numbered(lines, limit)]
    if not samples:
        raise SampleError(f"'{index}' holds no observation")
    for sample in samples:
        check_sample(sample, policy)
    return samples


def _numbered(lines: list[str], limit: int) -> Iterator[tuple[int, str]]:
    filled = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    return iter(filled[:limit])


def _sample(folder: Path, line: str, where: str) -> Sample:
    try:
        data: Any = json.loads(line)
        images = {str(view): _picture(folder / name, where) for view, name in data["images"].items()}
        state = None if data.get("state") is None else np.asarray(data["state"], np.float32)
        instruction = data["instruction"]
    except KeyError as error:
        raise SampleError(f"{where}: field {error} is missing; expected images, state and instruction") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise SampleError(f"{where}: not an observation ({error}); expected images, state and instruction") from None
    if not isinstance(instruction, str):
        raise SampleError(f"{where}: instruction is {instruction!r}, expected text")
    return Sample(images, state, instruction, where)


def _picture(path: Path, where: str) -> NDArray[np.uint8]:
    pixels = cv2.imread(str(path), cv2.IMREAD_COLOR)
    if pixels is None:
        raise SampleError(f"{where}: '{path}' is not an image that OpenCV reads; give PNG or JPEG files")
    return np.ascontiguousarray(pixels[:, :, ::-1], dtype=np.uint8)


def check_sample(sample: Sample, policy: Policy) -> None:
    """SampleError unless the sample has the policy's views, at sizes that fit its windows, and its state."""
    missing = [view for view in policy.views if view not in sample.images]
    if missing:
        has = ", ".join(sample.images) or "none"
        raise SampleError(f"{sample.where}: view '{missing[0]}' is missing, there are: {has}")
    for view in policy.views:
        height, width = sample.images[view].shape[:2]
        if height * width > policy.max_pixels:
            raise SampleError(
                f"{sample.where}: view '{view}' is {width}x{height}, more than the {policy.max_pixels} pixels of its "
                "window; raise max_pixels, or record smaller"
            )
    if sample.state is not None:
        expected = (len(policy.state_names),)
        if sample.state.shape != expected:
            raise SampleError(
                f"{sample.where}: state has shape {list(sample.state.shape)}, expected {list(expected)}: "
                f"{', '.join(policy.state_names)}"
            )
        if not np.isfinite(sample.state).all():
            raise SampleError(f"{sample.where}: state holds a value that is not finite")
