"""The one table of image encodings: what is viewed in place, what is converted, what is refused by name.

The bytes of a view go to the policy as they are, together with their channel order. A converted encoding goes
through `cv_bridge` where that works and through OpenCV elsewhere, by the codes of this table, to equal
pixels.

What is not in the table is refused, because a guess would feed the policy a wrong image without anybody
noticing:

- 16-bit and float encodings hold depth or need a scale that the message does not carry;
- `8UC2`, `8UC3` and `8UC4` say how many channels there are and not which: OpenCV programs mean BGR by `8UC3`,
  others RGB. `8UC1` has one channel to be wrong about, so it is taken as `mono8`;
- `nv21` and `nv24` are planar, yet sensor_msgs counts two channels a pixel for both, so that `step` and the
  size of `data` differ from one driver to the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ..policies.pixels import PixelOrder
from .frame import ImageError


@dataclass(frozen=True, slots=True)
class Conversion:
    """How an encoding becomes RGB.

    `opencv_code` names the constant for `cv2.cvtColor`; `bridge_name` is the encoding's oldest name, which
    every `cv_bridge` that can convert it knows. Width must be a multiple of `width_multiple`, and both sides
    at least `smallest_side`: OpenCV fills anything smaller than a whole colour neighbourhood with black.
    """

    opencv_code: str
    bridge_name: str
    width_multiple: int = 1
    smallest_side: int = 1


@dataclass(frozen=True, slots=True)
class Encoding:
    """One row of the table: bytes a pixel in the message, the order of the frame it gives, and how."""

    name: str
    bytes_per_pixel: int
    order: PixelOrder
    conversion: Conversion | None = None


def _yuv(name: str, code: str, bridge_name: str) -> Encoding:
    return Encoding(name, 2, PixelOrder.RGB, Conversion(code, bridge_name, width_multiple=2))


def _bayer(name: str, code: str) -> Encoding:
    return Encoding(name, 1, PixelOrder.RGB, Conversion(code, name, smallest_side=3))


_TABLE = (
    Encoding("rgb8", 3, PixelOrder.RGB),
    Encoding("bgr8", 3, PixelOrder.BGR),
    Encoding("rgba8", 4, PixelOrder.RGB),
    Encoding("bgra8", 4, PixelOrder.BGR),
    Encoding("mono8", 1, PixelOrder.MONO),
    Encoding("8UC1", 1, PixelOrder.MONO),
    _yuv("uyvy", "COLOR_YUV2RGB_UYVY", "yuv422"),
    _yuv("yuv422", "COLOR_YUV2RGB_UYVY", "yuv422"),
    _yuv("yuyv", "COLOR_YUV2RGB_YUY2", "yuv422_yuy2"),
    _yuv("yuv422_yuy2", "COLOR_YUV2RGB_YUY2", "yuv422_yuy2"),
    # ROS names a Bayer pattern by its first row and the start of its second, OpenCV by the second row's
    # second and third pixel: that is why rggb is BG.
    _bayer("bayer_rggb8", "COLOR_BayerBG2RGB"),
    _bayer("bayer_bggr8", "COLOR_BayerRG2RGB"),
    _bayer("bayer_gbrg8", "COLOR_BayerGR2RGB"),
    _bayer("bayer_grbg8", "COLOR_BayerGB2RGB"),
)

ENCODINGS: Mapping[str, Encoding] = MappingProxyType({encoding.name: encoding for encoding in _TABLE})
"""Every supported encoding by its `sensor_msgs` name."""

_ADVICE: Mapping[str, str] = MappingProxyType(
    {
        "8UC3": "it does not say RGB or BGR: publish rgb8 or bgr8",
        "8UC4": "it does not say RGBA or BGRA: publish rgba8 or bgra8",
        "nv21": "its memory layout differs between drivers: publish yuv422_yuy2 or rgb8",
        "nv24": "its memory layout differs between drivers: publish yuv422_yuy2 or rgb8",
        "16UC1": "it holds depth or raw counts, not a picture",
        "32FC1": "it holds depth or raw counts, not a picture",
        "mono16": "16 bits need a scale that the message does not carry: publish mono8",
    }
)


def find_encoding(name: str) -> Encoding:
    """The table's row for `name`; ImageError that names it and lists the supported ones if there is none."""
    encoding = ENCODINGS.get(name)
    if encoding is None:
        advice = f" ({_ADVICE[name]})" if name in _ADVICE else ""
        raise ImageError(f"encoding '{name}' is refused{advice}; supported: {', '.join(ENCODINGS)}")
    return encoding
