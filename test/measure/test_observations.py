"""Observations: different, real, within the windows, and the same for a seed."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from flashrt_ros.measure.errors import MeasureError
from flashrt_ros.measure.pi05.observations import (
    frame,
    instruction_of_length,
    make_observations,
    photographs,
)
from flashrt_ros.policies.pi05 import Pi05Policy, build
from test.measure.tiny import pictures, settings, write_tiny


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Pi05Policy:
    return build(settings(write_tiny(tmp_path_factory.mktemp("tiny") / "checkpoint")))


def test_they_differ_in_size_length_and_noise(policy: Pi05Policy) -> None:
    found = make_observations(policy, 8, pictures())
    lengths = {len(observation.tokens) for observation in found}
    shapes = {image.shape for observation in found for image in observation.images.values()}
    assert len(lengths) >= 5
    assert len(shapes) >= 3
    assert len({observation.noise.tobytes() for observation in found}) == 8
    assert max(lengths) <= policy.config.prompt_buckets[-1]
    assert all(h * w <= policy.max_pixels for h, w, _ in shapes)


def test_one_in_four_prompts_is_drawn_from_the_whole_vocabulary(policy: Pi05Policy) -> None:
    found = make_observations(policy, 8, pictures())
    bos = found[0].tokens[0]
    assert [bool(observation.tokens[0] == bos) for observation in found[:3]] == [True, True, True]
    drawn = np.concatenate([found[3].tokens, found[7].tokens])
    assert len(np.unique(drawn)) > 100
    assert drawn.max() < policy.config.vocabulary


def test_a_seed_decides_them(policy: Pi05Policy) -> None:
    one, same, other = (make_observations(policy, 3, pictures(), seed)[2] for seed in (1, 1, 2))
    assert np.array_equal(one.images["front"], same.images["front"])
    assert np.array_equal(one.tokens, same.tokens)
    assert not np.array_equal(one.noise, other.noise)


def test_a_frame_keeps_the_shape_of_what_it_shows() -> None:
    picture = np.zeros((200, 300, 3), np.uint8)
    picture[:, 150:] = 255
    cropped = frame(picture, (50, 70), np.random.default_rng(0))
    assert cropped.shape == (50, 70, 3)
    assert cropped.flags.c_contiguous
    assert {0, 255} <= set(np.unique(cropped))


def test_files_are_read_as_rgb(tmp_path: Path) -> None:
    red = np.zeros((4, 5, 3), np.uint8)
    red[..., 2] = 200  # OpenCV writes BGR
    cv2.imwrite(str(tmp_path / "red.png"), red)
    (image,) = photographs([tmp_path / "red.png"])
    assert image[0, 0].tolist() == [200, 0, 0]


def test_a_file_that_is_no_image_is_named(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("not an image")
    with pytest.raises(MeasureError, match=r"text\.png' is not an image"):
        photographs([tmp_path / "text.png"])


def test_real_photographs_are_there_where_scikit_image_is() -> None:
    pytest.importorskip("skimage")
    found = photographs()
    assert len(found) >= 4
    assert all(image.std() > 20 for image in found)


@pytest.mark.parametrize("tokens", [60, 111, 200])
def test_an_instruction_of_an_exact_length(policy: Pi05Policy, tokens: int) -> None:
    state = np.zeros(8, np.float32)
    text = instruction_of_length(policy, state, tokens)
    assert int((policy.processor.tokens(policy.processor.text(text, state)) >= 0).sum()) == tokens


def test_a_length_that_no_instruction_has(policy: Pi05Policy) -> None:
    with pytest.raises(MeasureError, match="exactly 3 tokens"):
        instruction_of_length(policy, np.zeros(8, np.float32), 3)
