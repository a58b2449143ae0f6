"""Filling a block from several threads; the uploads themselves are in test/gpu."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flashrt_ros.engine.upload import as_bytes, fill


@pytest.mark.parametrize("count", [1, 99, 100, 101, 1000, 1024])
def test_a_block_is_filled_from_its_beginning_and_no_further(count: int) -> None:
    source = np.random.default_rng(count).integers(0, 256, count, np.uint8)
    block = np.full(1024, 7, np.uint8)
    fill(block, source, piece=100)
    assert np.array_equal(block[:count], source)
    assert (block[count:] == 7).all()


def test_bytes_are_those_of_the_values_in_their_order() -> None:
    tensor = torch.arange(12, dtype=torch.int16).view(3, 4)
    assert as_bytes(tensor).numpy().tobytes() == tensor.numpy().tobytes()
    assert as_bytes(tensor).data_ptr() == tensor.data_ptr()
    assert as_bytes(tensor.t()).numpy().tobytes() == tensor.numpy().T.tobytes()
