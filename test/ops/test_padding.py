"""Padding of matrices to whole lines: sizes, values, and whose memory it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashrt_ros.ops.padding import in_padded_memory, padded_shape, padded_size, with_padding


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).bfloat16()


def test_sizes_are_whole_lines_of_every_type_of_operands() -> None:
    assert padded_shape((1, 128, 129, 588, 1152, 4304)) == (128, 128, 256, 640, 1152, 4352)
    for size in range(1, 1000):
        found = padded_size(size)
        assert found % 128 == 0
        assert 0 <= found - size < 128


@pytest.mark.parametrize("sizes", [(129, 128), (128, 72), (3, 5), (256, 1000)])
def test_a_view_has_the_values_of_the_matrix_and_its_memory_zeros_behind_them(sizes: tuple[int, int]) -> None:
    matrix, shape = drawn(*sizes), padded_shape(sizes)
    view = in_padded_memory(matrix.float(), shape, torch.bfloat16)
    assert view.dtype == torch.bfloat16
    assert torch.equal(view, matrix)
    assert view.stride() == (shape[1], 1)
    whole = with_padding(view, shape)
    assert whole.data_ptr() == view.data_ptr()
    assert whole.shape == shape
    assert whole.is_contiguous()
    assert torch.equal(whole, torch.nn.functional.pad(matrix, (0, shape[1] - sizes[1], 0, shape[0] - sizes[0])))


def test_what_has_no_room_is_copied() -> None:
    matrix = drawn(4, 5)
    whole = with_padding(matrix, (128, 128))
    assert torch.equal(whole[:4, :5], matrix)
    assert int((whole != 0).sum()) == int((matrix != 0).sum())
    assert torch.equal(with_padding(drawn(5), (128,)), torch.nn.functional.pad(drawn(5), (0, 123)))


@pytest.mark.parametrize("part", [(slice(0, 100), slice(None)), (slice(None), slice(0, 100)), (slice(28, 128),)])
def test_a_part_of_something_else_is_copied(part: tuple[slice, ...]) -> None:
    matrix = drawn(128, 128)[part]
    whole = with_padding(matrix, (128, 128))
    assert whole.data_ptr() != matrix.data_ptr()
    assert torch.equal(whole[: matrix.shape[0], : matrix.shape[1]], matrix)
    assert int((whole != 0).sum()) == int((matrix != 0).sum())


def test_a_matrix_that_fits_stays_what_it_is() -> None:
    matrix = drawn(128, 256)
    assert with_padding(matrix, (128, 256)) is matrix
    turned = with_padding(matrix.t(), (256, 128))
    assert torch.equal(turned, matrix.t())
    assert turned.is_contiguous()


@pytest.mark.parametrize("shape", [(128,), (3, 128), (128, 4)])
def test_too_little_room_is_refused(shape: tuple[int, ...]) -> None:
    for place in (in_padded_memory, with_padding):
        with pytest.raises(ValueError, match=r"\[4, 5\] has no room in"):
            place(drawn(4, 5), shape)
