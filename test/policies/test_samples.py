"""Observations in a folder: read as they are, refused by file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from flashrt_ros.policies.samples import INDEX, SampleError, check_sample, read_folder
from test.policies.pi05.tiny import STATE, frame, small_policy

POLICY = small_policy()
LINE: dict[str, Any] = {
    "images": {"front": "a.png", "wrist": "b.png"},
    "state": STATE.tolist(),
    "instruction": "fold the towel",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for index, name in enumerate(("a.png", "b.png")):
        cv2.imwrite(str(tmp_path / name), frame(index)[:, :, ::-1])
    cv2.imwrite(str(tmp_path / "large.png"), frame(2, 100, 100))
    (tmp_path / "text.png").write_text("no picture")
    write(tmp_path, LINE, {**LINE, "instruction": "open the drawer"})
    return tmp_path


def write(folder: Path, *lines: Any) -> None:
    text = "\n\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (folder / INDEX).write_text(text + "\n")


def test_samples_are_the_lines_in_order(folder: Path) -> None:
    first, second = read_folder(folder, POLICY, 10)
    assert (first.instruction, second.instruction) == ("fold the towel", "open the drawer")
    assert np.array_equal(first.images["front"], frame(0))
    assert np.array_equal(first.images["wrist"], frame(1))
    assert first.state is not None
    assert np.array_equal(first.state, STATE)
    assert len(read_folder(folder, POLICY, 1)) == 1


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in LINE.items() if key != name}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not an observation"),
        ("3", "not an observation"),
        (without("images"), "field 'images' is missing"),
        (without("instruction"), "field 'instruction' is missing"),
        ({**LINE, "instruction": 3}, "instruction is 3, expected text"),
        ({**LINE, "images": {"front": "a.png"}}, "view 'wrist' is missing, there are: front"),
        ({**LINE, "images": {"front": "none.png", "wrist": "b.png"}}, r"none\.png' is not an image"),
        ({**LINE, "images": {"front": "text.png", "wrist": "b.png"}}, r"text\.png' is not an image"),
        ({**LINE, "images": {"front": "large.png", "wrist": "b.png"}}, "view 'front' is 100x100, more than the 4096"),
        ({**LINE, "state": [0.0, 1.0]}, r"state has shape \[2\], expected \[8\]: panda_joint1"),
        ({**LINE, "state": [float("nan")] * 8}, "not finite"),
        ({**LINE, "state": ["a"] * 8}, "not an observation"),
    ],
)
def test_a_line_that_is_wrong_is_named(folder: Path, line: Any, said: str) -> None:
    write(folder, LINE, line)
    with pytest.raises(SampleError, match=said) as caught:
        read_folder(folder, POLICY, 10)
    assert f"{INDEX}:3" in str(caught.value)


def test_a_folder_without_observations_is_refused(folder: Path, tmp_path: Path) -> None:
    write(folder)
    with pytest.raises(SampleError, match="holds no observation"):
        read_folder(folder, POLICY, 10)
    with pytest.raises(SampleError, match=r"cannot read '.*elsewhere.*expected one JSON object a line"):
        read_folder(tmp_path / "elsewhere", POLICY, 10)


def test_a_state_that_the_policy_needs_may_be_absent_until_it_is_asked_for(folder: Path) -> None:
    write(folder, without("state"))
    (sample,) = read_folder(folder, POLICY, 1)
    assert sample.state is None
    check_sample(sample, POLICY)
