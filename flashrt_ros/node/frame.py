"""One camera frame as the policy's window wants it, and the one copy into that window."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..policies.pixels import PixelOrder


class ImageError(ValueError):
    """A camera message that cannot become a frame; the text says what was found, what is allowed and what to
    do."""


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """Pixels of one camera at one moment.

    `pixels` is uint8[height, width, channels] and usually a read-only view of the message's bytes, with a
    stride between rows where the camera pads them. `order` says what the channels mean; a fourth one is
    alpha.
    """

    pixels: NDArray[np.uint8]
    order: PixelOrder
