"""How codes of queries, keys and values lie for the prefix's attention; no GPU is needed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashrt_ros.ops.cuda.head_codes import HeadCodes, arranged, keys_in_order, places, values_in_order
from flashrt_ros.ops.cuda.rows import CODES

SCALES = torch.tensor([0.5, 0.25, 2.0])


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(CODES)


def equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 64, 65, 712])
def test_what_is_arranged_comes_back_in_order(rows: int) -> None:
    query, key, value = drawn(rows, 8, 256), drawn(rows, 256), drawn(rows, 256)
    made = arranged(query, key, value, SCALES)
    made.demand("op", rows, torch.device("cpu"))
    assert equal(made.query, query)
    assert equal(keys_in_order(made.key, rows), key)
    assert equal(values_in_order(made.value, rows), value)


def test_keys_change_their_order_within_sixteen_alone() -> None:
    found = places(64).view(4, 16)
    assert torch.equal(found.sort(1).values, torch.arange(64).view(4, 16))
    assert found[0].tolist() == [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]


def test_four_neighbours_of_the_second_product_are_scores_of_one_thread() -> None:
    """Thread q of four has columns 8 m + 2 q and the next one of the scores; as operand it holds columns 4 q and on."""
    for quad in range(4):
        columns = {int(places(16)[4 * quad + i]) for i in range(4)}
        assert columns == {8 * matrix + 2 * quad + i for matrix in range(2) for i in range(2)}


def test_the_first_rows_are_in_the_same_memory() -> None:
    whole = HeadCodes.allocate(300, SCALES)
    part = whole.first(130, SCALES * 2)
    part.demand("op", 130, torch.device("cpu"))
    assert (part.query.data_ptr(), part.key.data_ptr(), part.value.data_ptr()) == (
        whole.query.data_ptr(), whole.key.data_ptr(), whole.value.data_ptr()
    )  # fmt: skip
    assert torch.equal(part.scales, SCALES * 2)
