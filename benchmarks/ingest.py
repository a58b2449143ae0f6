"""How long a camera frame takes from the bytes of its message to the policy's window, against one plain copy.

Ingest is everything that the node does to a raw `sensor_msgs/Image`: parse the CDR header, look up the
encoding, check the sizes, view the pixels, copy them once. It is compared with `numpy.copyto` between two
contiguous arrays of the same number of bytes. Both run in the same loop, in random order, on messages that
are not in the near caches.

Run: `python benchmarks/ingest.py` (writes benchmarks/results/ingest.json; exits with 1 if a bar is missed).
"""

from __future__ import annotations

import random
import sys
import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import numpy as np
from _common import percentiles, write_result
from numpy.typing import NDArray
from rclpy.serialization import serialize_message
from sensor_msgs.msg import Image

from flashrt_ros.node.cdr import parse_image
from flashrt_ros.node.images import image_to_frame
from flashrt_ros.policies.pixels import copy_pixels

SIZES = ((640, 480), (1280, 720))
PADDING = 64  # bytes after each row, as cameras with aligned rows send them
BARS = {0: 1.5, PADDING: 2.0}  # ingest over plain copy, at most
# As many messages as make the loop walk through far more memory than the near caches hold.
POOL_BYTES = 64 << 20
WARM_UP = 50
ROUNDS = 2000
PROTOCOL = (
    f"{ROUNDS} rounds a case after {WARM_UP} of warm-up. In each round ingest, plain copy and header parsing run once, "
    f"in random order, each on the next message of a pool of {POOL_BYTES >> 20} MiB. Ingest: serialised bytes to "
    "window. Plain copy: numpy.copyto of as many bytes from the end of a message, contiguous to contiguous. Header: "
    "ingest without its copy. Wall-clock by perf_counter_ns, one thread, not pinned. Ratio: median over median."
)


@dataclass(frozen=True)
class Result:
    """One image format. Times are percentiles in microseconds; `ratio` is ingest over plain copy, medians."""

    width: int
    height: int
    encoding: str
    row_padding_bytes: int
    copied_bytes: int
    header_us: Mapping[str, float]
    ingest_us: Mapping[str, float]
    plain_copy_us: Mapping[str, float]
    ratio: float
    bar: float
    met: bool


def main() -> int:
    """Measure every case and write the file; 1 if a bar is missed."""
    results = [measure(width, height, padding) for width, height in SIZES for padding in BARS]
    write_result("ingest", {"results": [asdict(result) for result in results]}, PROTOCOL)
    for result in results:
        print(row(result))
    return 0 if all(result.met for result in results) else 1


def measure(width: int, height: int, padding: int) -> Result:
    """Time one image format."""
    messages = message_pool(width, height, padding)
    window = np.zeros(width * height * 4, np.uint8)
    copied = width * height * 3
    sources = [np.frombuffer(raw, np.uint8, copied, len(raw) - copied) for raw in messages]

    def ingest(index: int) -> None:
        copy_pixels(window, image_to_frame(parse_image(messages[index])).pixels)

    def plain_copy(index: int) -> None:
        np.copyto(window[:copied], sources[index])

    def header(index: int) -> None:
        image_to_frame(parse_image(messages[index]))

    functions = {"ingest": ingest, "plain_copy": plain_copy, "header": header}
    times = interleaved(functions, len(messages))
    check_pixels(messages[0], window, width, height, padding)
    ratio = float(np.median(times["ingest"]) / np.median(times["plain_copy"]))
    return Result(
        width=width,
        height=height,
        encoding="rgb8",
        row_padding_bytes=padding,
        copied_bytes=copied,
        header_us=percentiles(times["header"]),
        ingest_us=percentiles(times["ingest"]),
        plain_copy_us=percentiles(times["plain_copy"]),
        ratio=round(ratio, 3),
        bar=BARS[padding],
        met=ratio <= BARS[padding],
    )


def message_pool(width: int, height: int, padding: int) -> list[bytes]:
    """Serialised messages with different pixels."""
    step = 3 * width + padding
    generator = np.random.default_rng(0)
    message = Image(encoding="rgb8", width=width, height=height, step=step)
    message.header.frame_id = "camera_optical_frame"
    pool = []
    for number in range(max(2, POOL_BYTES // (step * height))):
        message.header.stamp.sec = number
        message.data = array("B", generator.integers(0, 256, step * height, np.uint8).tobytes())
        pool.append(serialize_message(message))
    return pool


def interleaved(functions: Mapping[str, Callable[[int], None]], messages: int) -> dict[str, list[float]]:
    """Microseconds of each call: in every round each function runs once, in random order, on another
    message."""
    shuffler, index = random.Random(0), 0
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(WARM_UP + ROUNDS):
        for name in shuffler.sample(list(functions), len(functions)):
            index = (index + 1) % messages
            start = time.perf_counter_ns()
            functions[name](index)
            times[name].append((time.perf_counter_ns() - start) / 1e3)
    return {name: values[WARM_UP:] for name, values in times.items()}


def check_pixels(raw: bytes, window: NDArray[np.uint8], width: int, height: int, padding: int) -> None:
    """What is measured must also be right."""
    copy_pixels(window, image_to_frame(parse_image(raw)).pixels)
    step = 3 * width + padding
    rows = np.frombuffer(raw, np.uint8, step * height, len(raw) - step * height).reshape(height, step)
    expected = rows[:, : 3 * width].ravel()
    if not np.array_equal(window[: expected.size], expected):
        raise SystemExit(f"{width}x{height}, padding {padding}: the window holds other pixels than the message")


def row(result: Result) -> str:
    """One line of the printed table."""
    size = f"{result.width}x{result.height} padding {result.row_padding_bytes:2d}"
    times = f"ingest {result.ingest_us['p50']:.1f} us, plain copy {result.plain_copy_us['p50']:.1f} us"
    verdict = "met" if result.met else "MISSED"
    return f"{size}: {times}, ratio {result.ratio:.2f} (at most {result.bar}: {verdict})"


if __name__ == "__main__":
    sys.exit(main())
