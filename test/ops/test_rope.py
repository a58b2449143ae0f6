from __future__ import annotations

import math

import pytest
import torch

from flashrt_ros.ops import ShapeError
from flashrt_ros.ops.rope import rope_table, select_rows, split_rope_write
from test.ops.forbid import CaptureSafe, random

ROWS, QUERIES, HEADS, WIDTH = 6, 4, 2, 8


def table(positions: int = 20) -> torch.Tensor:
    out = torch.empty(positions, WIDTH)
    rope_table(theta=10000.0, out=out)
    return out


def written(qkv: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query = torch.empty(ROWS, QUERIES, WIDTH)
    key, value = torch.empty(ROWS, HEADS, WIDTH), torch.empty(ROWS, HEADS, WIDTH)
    split_rope_write(qkv, rope, query=query, key=key, value=value)
    return query, key, value


def test_the_table_holds_cosines_then_sines_of_every_position() -> None:
    for position in (0, 1, 19):
        angles = [position / 10000 ** (2 * i / WIDTH) for i in range(WIDTH // 2)]
        expected = torch.tensor([math.cos(a) for a in angles] + [math.sin(a) for a in angles])
        torch.testing.assert_close(table()[position], expected)


def test_rows_are_rotated_as_complex_numbers() -> None:
    qkv, rope = random(ROWS, (QUERIES + 2 * HEADS) * WIDTH), table(ROWS)
    query, key, value = written(qkv, rope)
    parts = qkv.view(ROWS, -1, WIDTH)
    turn = torch.complex(rope[:, None, : WIDTH // 2], rope[:, None, WIDTH // 2 :])
    as_complex = torch.complex(parts[..., : WIDTH // 2], parts[..., WIDTH // 2 :]) * turn
    rotated = torch.cat((as_complex.real, as_complex.imag), dim=-1)
    torch.testing.assert_close(query, rotated[:, :QUERIES])
    torch.testing.assert_close(key, rotated[:, QUERIES : QUERIES + HEADS])
    assert torch.equal(value, parts[:, QUERIES + HEADS :])


def test_products_of_queries_and_keys_depend_on_distance_alone() -> None:
    vector = random(1, (1 + 2) * WIDTH)
    scores = []
    for first, second in ((3, 7), (11, 15)):
        query, key, value = torch.empty(1, 1, WIDTH), torch.empty(1, 1, WIDTH), torch.empty(1, 1, WIDTH)
        split_rope_write(vector, table()[first : first + 1], query=query, key=key.clone(), value=value)
        split_rope_write(vector, table()[second : second + 1], query=query.clone(), key=key, value=value)
        scores.append((query * key).sum())
    torch.testing.assert_close(scores[0], scores[1])


def test_keys_and_values_alone_need_no_query() -> None:
    qkv, rope = random(ROWS, (QUERIES + 2 * HEADS) * WIDTH), table(ROWS)
    _, expected_key, expected_value = written(qkv, rope)
    key, value = torch.empty_like(expected_key), torch.empty_like(expected_value)
    split_rope_write(qkv[:, QUERIES * WIDTH :], rope, query=None, key=key, value=value)
    assert torch.equal(key, expected_key)
    assert torch.equal(value, expected_value)


def test_keys_go_to_strided_rows_of_a_larger_buffer() -> None:
    qkv, rope = random(ROWS, (QUERIES + 2 * HEADS) * WIDTH), table(ROWS)
    _, expected_key, expected_value = written(qkv, rope)
    cache = torch.zeros(2, ROWS + 3, HEADS, WIDTH)
    query = torch.empty(ROWS, QUERIES, WIDTH)
    split_rope_write(qkv, rope, query=query, key=cache[0, 1 : ROWS + 1], value=cache[1, 1 : ROWS + 1])
    assert torch.equal(cache[0, 1 : ROWS + 1], expected_key)
    assert torch.equal(cache[1, 1 : ROWS + 1], expected_value)
    assert not cache[:, 0].any()
    assert not cache[:, ROWS + 1 :].any()


def test_packed_rows_of_another_width_are_refused() -> None:
    with pytest.raises(ShapeError, match="split_rope_write: 'qkv' dimension 1 must be 64 .*got 63"):
        written(random(ROWS, 63), table(ROWS))


@pytest.mark.parametrize("start", [0, 5, 14])
def test_selected_rows_start_where_the_device_says(start: int) -> None:
    out = torch.empty(6, WIDTH)
    with CaptureSafe():
        select_rows(table(), torch.tensor([start], dtype=torch.int32), out=out)
    assert torch.equal(out, table()[start : start + 6])
