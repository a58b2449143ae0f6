from __future__ import annotations

import pytest
import torch

from flashrt_ros.ops import ShapeError
from flashrt_ros.ops.embed import ABSENT, count_tokens, embed
from test.ops.forbid import CaptureSafe, random


def tokens(*ids: int) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int32)


def test_rows_are_scaled_and_absent_tokens_take_the_first_row() -> None:
    table, out = random(7, 4), torch.empty(3, 4)
    embed(tokens(5, 0, ABSENT), table, scale=2.0, out=out)
    torch.testing.assert_close(out, table[[5, 0, 0]] * 2)


def test_sixteen_bit_rows_are_rounded_once() -> None:
    table, out = random(7, 64, dtype=torch.bfloat16), torch.empty(1, 64, dtype=torch.bfloat16)
    embed(tokens(3), table, scale=45.2548, out=out)
    assert torch.equal(out[0], (table[3].double() * 45.2548).bfloat16())


@pytest.mark.parametrize(("ids", "count"), [((2, 5, 9), 3), ((2, 5, ABSENT), 2), ((ABSENT,) * 3, 0), ((0, 0, 0), 3)])
def test_absent_tokens_are_not_counted(ids: tuple[int, ...], count: int) -> None:
    out = torch.zeros(1, dtype=torch.int32)
    with CaptureSafe():
        count_tokens(tokens(*ids), base=100, out=out)
    assert out.tolist() == [100 + count]


def test_a_bucket_of_another_length_is_refused() -> None:
    with pytest.raises(ShapeError, match="embed: 'out' dimension 0 'rows' must be 2"):
        embed(tokens(1, 2), random(7, 4), scale=1.0, out=torch.empty(3, 4))
