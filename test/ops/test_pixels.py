from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashrt_ros.ops import ShapeError
from flashrt_ros.ops.pixels import pixels_to_patches
from flashrt_ros.policies.pixels import PixelOrder
from test.ops.forbid import CaptureSafe

PATCH, GRID = 4, 5
SIZE = PATCH * GRID
TOLERANCE = 1e-5  # two roundings of a float32 source coordinate, times a step from black to white


def picture(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)


def patches(image: np.ndarray, order: PixelOrder = PixelOrder.RGB, *, surplus: int = 7) -> Tensor:
    """Run the op on a window that is larger than the image."""
    window = torch.full((image.size + surplus,), 77, dtype=torch.uint8)
    window[: image.size] = torch.from_numpy(image.reshape(-1))
    out = torch.full((GRID * GRID, 3 * PATCH * PATCH), float("nan"))
    height, width, channels = image.shape
    with CaptureSafe():
        pixels_to_patches(
            window, torch.tensor([height, width, channels, order], dtype=torch.int32), patch=PATCH, out=out
        )
    return out


def as_image(rows: Tensor) -> Tensor:
    """[3, size, size] of patch rows."""
    return rows.view(GRID, GRID, 3, PATCH, PATCH).permute(2, 0, 3, 1, 4).reshape(3, SIZE, SIZE)


def letterboxed(image: np.ndarray) -> Tensor:
    """The same by torch's own resize and padding: float32[3, size, size]."""
    height, width, _ = image.shape
    ratio = max(width / SIZE, height / SIZE)
    inner = (int(height / ratio), int(width / ratio))
    resized = F.interpolate(torch.from_numpy(image).permute(2, 0, 1)[None].float() / 255, inner, mode="bilinear")[0]
    top, left = (SIZE - inner[0]) // 2, (SIZE - inner[1]) // 2
    padding = (left, SIZE - inner[1] - left, top, SIZE - inner[0] - top)
    return F.pad(resized * 2 - 1, padding, value=-1.0)


@pytest.mark.parametrize(
    ("height", "width"), [(20, 20), (48, 64), (64, 48), (7, 9), (20, 60), (1, 1), (1, 20), (31, 17), (480, 640)]
)
def test_it_is_the_letterbox_of_the_training_code(height: int, width: int) -> None:
    image = picture(height, width)
    torch.testing.assert_close(as_image(patches(image)), letterboxed(image), atol=TOLERANCE, rtol=0)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 90), st.integers(1, 90))
def test_it_is_the_letterbox_at_any_size(height: int, width: int) -> None:
    if max(height, width) > SIZE * min(height, width):
        return  # torch cannot resize to zero rows
    image = picture(height, width)
    torch.testing.assert_close(as_image(patches(image)), letterboxed(image), atol=TOLERANCE, rtol=0)


def test_an_image_thinner_than_a_pixel_keeps_one_row() -> None:
    result = as_image(patches(np.full((1, 500, 3), 255, np.uint8)))
    assert (result[:, 9] == 1).all()
    assert (result[:, :9] == -1).all()
    assert (result[:, 10:] == -1).all()


def test_a_patch_row_is_channel_then_y_then_x() -> None:
    image = np.zeros((SIZE, SIZE, 3), np.uint8)
    image[PATCH + 1, 2 * PATCH + 3, 2] = 255
    rows = patches(image)
    assert torch.argwhere(rows > 0).tolist() == [[GRID + 2, 2 * PATCH * PATCH + 1 * PATCH + 3]]


def test_bgr_is_rgb_with_swapped_channels() -> None:
    image = picture(30, 40)
    swapped = np.ascontiguousarray(image[:, :, ::-1])
    assert torch.equal(patches(swapped, PixelOrder.BGR), patches(image))


@pytest.mark.parametrize("order", [PixelOrder.RGB, PixelOrder.BGR])
def test_a_fourth_channel_is_ignored(order: PixelOrder) -> None:
    image = picture(30, 40, 4)
    assert torch.equal(patches(image, order), patches(np.ascontiguousarray(image[:, :, :3]), order))


def test_mono_is_grey() -> None:
    image = picture(30, 40, 1)
    assert torch.equal(patches(image, PixelOrder.MONO), patches(np.repeat(image, 3, axis=2)))


def test_bytes_behind_the_image_do_not_matter() -> None:
    image = picture(13, 21)
    assert torch.equal(patches(image, surplus=0), patches(image, surplus=1000))


def test_black_is_minus_one_and_white_is_one() -> None:
    assert (as_image(patches(np.zeros((20, 20, 3), np.uint8))) == -1).all()
    assert (as_image(patches(np.full((20, 20, 3), 255, np.uint8))) == 1).all()


def test_an_unfilled_window_gives_finite_patches() -> None:
    out = torch.full((GRID * GRID, 3 * PATCH * PATCH), float("nan"))
    pixels_to_patches(torch.zeros(64, dtype=torch.uint8), torch.zeros(4, dtype=torch.int32), patch=PATCH, out=out)
    assert out.isfinite().all()


def test_the_number_of_patches_must_be_a_square() -> None:
    out = torch.zeros(6, 3 * PATCH * PATCH)
    with pytest.raises(ShapeError, match="'patches' must be a square number, got 6"):
        pixels_to_patches(torch.zeros(64, dtype=torch.uint8), torch.zeros(4, dtype=torch.int32), patch=PATCH, out=out)


def test_a_format_of_three_numbers_is_refused() -> None:
    out = torch.zeros(4, 3 * PATCH * PATCH)
    with pytest.raises(ShapeError, match="pixels_to_patches: 'pixel_format' dimension 0 must be 4"):
        pixels_to_patches(torch.zeros(64, dtype=torch.uint8), torch.zeros(3, dtype=torch.int32), patch=PATCH, out=out)
