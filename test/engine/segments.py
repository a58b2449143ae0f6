"""Random layouts, for comparing a faster copy with its reference."""

from __future__ import annotations

import random

from flashrt_ros.contract import Region
from flashrt_ros.engine.layout import Segment


def random_segments(seed: int, most: int = 6) -> tuple[list[Segment], int, int]:
    """Segments with and without 16-byte alignment, empty ones among them; sizes of arena and packed block."""
    draw, segments, source, packed = random.Random(seed), [], 0, 0
    for number in range(draw.randint(1, most)):
        blocks, unit = draw.randint(1, 18), draw.choice((1, 4, 16, 512))
        live = unit * draw.randint(0, 300)
        pitch = live + unit * draw.randint(0, 50)
        region = Region(f"r{number}", "b", 0, max(1, pitch) * blocks, blocks)
        segments.append(Segment(region, source, pitch, blocks, live, packed))
        source += -(-pitch * blocks // 16) * 16
        packed += -(-live * blocks // 16) * 16
    return segments, max(source, 16), max(packed, 16)
