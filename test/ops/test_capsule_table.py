"""The table that the capsule kernel is given says what its reference does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flashrt_ros.contract import Region
from flashrt_ros.engine.copier import copy_with_torch
from flashrt_ros.engine.layout import Segment
from flashrt_ros.ops.cuda.capsule import fill_table
from flashrt_ros.ops.cuda.errors import KernelError

from ..engine.segments import random_segments

_TILE = 256 * 4  # units


def walk(segments: list[Segment], arena: np.ndarray, packed: np.ndarray) -> np.ndarray:
    """Gather as kernels/capsule.cu does, tile by tile; returns how often each packed byte was written."""
    table, tiles = fill_table(segments)
    written = np.zeros(len(packed), np.int64)
    for block in range(tiles):
        index = max(i for i in range(table.count) if table.segments[i].first_tile <= block)
        row = table.segments[index]
        piece, within = divmod(block - row.first_tile, row.piece_tiles)
        unit = 16 if row.wide else 1
        start, end = within * _TILE * unit, min((within + 1) * _TILE, row.units) * unit
        target = row.packed + piece * row.live
        source = row.source + piece * row.pitch
        packed[target + start : target + end] = arena[source + start : source + end]
        written[target + start : target + end] += 1
    return written


@pytest.mark.parametrize("seed", range(20))
def test_it_covers_every_live_byte_once_and_no_other(seed: int) -> None:
    segments, arena_bytes, packed_bytes = random_segments(seed)
    live = [segment for segment in segments if segment.nbytes]
    arena = np.random.default_rng(seed).integers(0, 256, arena_bytes, np.uint8)
    expected, packed = np.full((2, packed_bytes), 7, np.uint8)
    copy_with_torch(torch.from_numpy(arena), segments)(torch.from_numpy(expected), True)
    written = walk(live, arena, packed)
    np.testing.assert_array_equal(packed, expected)
    assert written.sum() == sum(segment.nbytes for segment in live)
    assert written.max(initial=0) <= 1


def test_rows_of_sixteen_bytes_are_copied_so() -> None:
    aligned = Segment(Region("a", "b", 0, 4096, 2), 256, 2048, 2, 1024, 0)
    odd = Segment(Region("c", "b", 0, 4096, 2), 256, 2048, 2, 1023, 2048)
    table, tiles = fill_table([aligned, odd])
    assert [(row.wide, row.units, row.first_tile) for row in table.segments[:2]] == [(1, 64, 0), (0, 1023, 2)]
    assert tiles == 4


def test_a_piece_that_is_too_long_is_refused_by_name() -> None:
    huge = Segment(Region("huge", "b", 0, 2**33), 1, 2**33, 1, 2**33, 0)
    with pytest.raises(KernelError, match="region 'huge' has pieces of 8589934592 live bytes.*split the region"):
        fill_table([huge])
