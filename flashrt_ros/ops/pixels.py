"""From the camera's raw bytes to normalised patch rows, in one op."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .shapes import ShapeError, check

_BGR, _MONO = 1, 2  # order codes of a pixel format; everything else is RGB


def pixels_to_patches(pixels: Tensor, pixel_format: Tensor, *, patch: int, out: Tensor) -> None:
    """Letterbox one camera image, normalise it and cut it into patches.

    The image is resized with its aspect kept (bilinear, no antialiasing, half-pixel centres), centred on a square and
    padded with -1; pixel values 0 to 255 become -1 to 1. The format is data, not shape: height, width, channels and
    channel order may change between two replays of one captured graph.

    Args:
        pixels: uint8[capacity], rows without padding, channels last; bytes behind the live image are ignored.
        pixel_format: int32[4] on the same device: height, width, channels (1, 3 or 4) and order (0 RGB, 1 BGR, 2 mono).
            A fourth channel is ignored. The host guarantees height * width * channels <= capacity.
        patch: edge of one square patch in pixels.
        out: float[grid * grid, 3 * patch * patch], written; row = patch (row-major), column = channel, y, x.
    """
    check(
        "pixels_to_patches",
        pixels=(pixels, "capacity"),
        pixel_format=(pixel_format, "4"),
        out=(out, ("patches", 3 * patch * patch)),
    )
    grid = math.isqrt(out.shape[0])
    if grid * grid != out.shape[0]:
        raise ShapeError(f"pixels_to_patches: 'out' dimension 0 'patches' must be a square number, got {out.shape[0]}")
    image = _letterbox(pixels, pixel_format, grid * patch)
    rows = image.view(3, grid, patch, grid, patch).permute(1, 3, 0, 2, 4)
    out.copy_(rows.reshape(out.shape))


def _letterbox(pixels: Tensor, pixel_format: Tensor, size: int) -> Tensor:
    """float32[3, size, size] between -1 and 1."""
    height, width, channels, order = pixel_format.unbind()
    # 64-bit, and truncated: the resized size must be the integer that Python's float division gives.
    # The divisor is a tensor because CUDA multiplies by the reciprocal of a number, which may be one pixel off.
    side = torch.full_like(height, size, dtype=torch.float64)
    ratio = torch.maximum(height.double() / side, width.double() / side).clamp(min=1 / size)
    top, bottom, weight_y, inside_y = _axis(height, ratio, size)
    left, right, weight_x, inside_x = _axis(width, ratio, size)
    offsets = _channel_offsets(channels, order)

    def gather(rows: Tensor, columns: Tensor) -> Tensor:
        index = (rows[:, None] * width + columns[None, :]) * channels + offsets[:, None, None]
        return pixels[index.clamp(0, pixels.shape[0] - 1)].float()

    upper = torch.lerp(gather(top, left), gather(top, right), weight_x)
    lower = torch.lerp(gather(bottom, left), gather(bottom, right), weight_x)
    value = torch.lerp(upper, lower, weight_y[:, None])
    inside = inside_y[:, None] & inside_x[None, :]
    return torch.where(inside, value * (2 / 255) - 1, -1.0)


def _axis(extent: Tensor, ratio: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For each of `size` target positions: two source positions, the weight of the second, and whether it is inside."""
    resized = (extent / ratio).long().clamp(min=1)
    padding = (size - resized) // 2
    position = torch.arange(size, device=extent.device) - padding
    scale = extent.float() / resized.float()
    source = ((position + 0.5) * scale - 0.5).clamp(min=0)
    last = (extent - 1).clamp(min=0)
    first = source.long().clamp(max=last)
    return first, (first + 1).clamp(max=last), source - first, (position >= 0) & (position < resized)


def _channel_offsets(channels: Tensor, order: Tensor) -> Tensor:
    """int64[3]: which byte of a pixel is red, green and blue."""
    rgb = torch.arange(3, device=channels.device)
    swapped = torch.where(order == _BGR, 2 - rgb, rgb)
    return torch.where(order == _MONO, 0, swapped).clamp(max=channels - 1)
