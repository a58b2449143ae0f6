from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flashrt_ros.ops import ShapeError
from flashrt_ros.ops.attention import chunk_attention, image_attention, prefix_attention
from test.ops.forbid import CaptureSafe, random

ROWS, CHUNK, QUERIES, WIDTH = 9, 4, 6, 8


def attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[rows, queries * width] in double precision, head by head."""
    _, queries, width = query.shape
    shared = queries // key.shape[1]
    heads = []
    for head in range(queries):
        k, v = key[:, head // shared].double(), value[:, head // shared].double()
        weights = (query[:, head].double() @ k.T / math.sqrt(width)).softmax(-1)
        heads.append(weights @ v)
    return torch.cat(heads, dim=-1).float()


def valid(count: int) -> Tensor:
    return torch.tensor([count], dtype=torch.int32)


@pytest.mark.parametrize("heads", [1, 2, 6])
@pytest.mark.parametrize("count", [1, 5, ROWS])
def test_prefix_rows_attend_to_the_valid_rows(heads: int, count: int) -> None:
    query = random(ROWS, QUERIES, WIDTH)
    key, value = random(ROWS, heads, WIDTH, seed=1), random(ROWS, heads, WIDTH, seed=2)
    out = torch.empty(ROWS, QUERIES * WIDTH)
    with CaptureSafe():
        prefix_attention(query, key, value, valid(count), out=out)
    torch.testing.assert_close(out, attended(query, key[:count], value[:count]))


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("count", [0, 5, ROWS])
def test_the_chunk_attends_to_valid_prefix_rows_and_to_itself(heads: int, count: int) -> None:
    query = random(CHUNK, QUERIES, WIDTH)
    prefix = random(ROWS, heads, WIDTH, seed=1), random(ROWS, heads, WIDTH, seed=2)
    own = random(CHUNK, heads, WIDTH, seed=3), random(CHUNK, heads, WIDTH, seed=4)
    out = torch.empty(CHUNK, QUERIES * WIDTH)
    with CaptureSafe():
        chunk_attention(query, *prefix, *own, valid(count), out=out)
    key, value = (torch.cat((p[:count], o)) for p, o in zip(prefix, own, strict=True))
    torch.testing.assert_close(out, attended(query, key, value))


def test_rows_behind_the_valid_ones_do_not_matter() -> None:
    query, key = random(CHUNK, QUERIES, WIDTH), random(ROWS, 1, WIDTH, seed=1)
    own, first, second = random(CHUNK, 1, WIDTH, seed=3), *(torch.empty(CHUNK, QUERIES * WIDTH) for _ in range(2))
    chunk_attention(query, key, key, own, own, valid(5), out=first)
    changed = key.clone()
    changed[5:] = 1e4
    chunk_attention(query, changed, changed, own, own, valid(5), out=second)
    assert torch.equal(first, second)


def test_images_attend_to_themselves_only() -> None:
    qkv, out = random(2 * ROWS, 3 * QUERIES * WIDTH), torch.empty(2 * ROWS, QUERIES * WIDTH)
    image_attention(qkv, images=2, heads=QUERIES, out=out)
    for image in range(2):
        rows = slice(image * ROWS, (image + 1) * ROWS)
        query, key, value = qkv[rows].view(ROWS, 3, QUERIES, WIDTH).unbind(1)
        torch.testing.assert_close(out[rows], attended(query, key, value))


def test_a_chunk_of_another_length_is_refused() -> None:
    query, key, own = random(CHUNK, QUERIES, WIDTH), random(ROWS, 1, WIDTH), random(CHUNK + 1, 1, WIDTH)
    with pytest.raises(ShapeError, match="chunk_attention: 'chunk_key' dimension 0 'chunk' must be 4"):
        chunk_attention(query, key, key, own, own, valid(3), out=torch.empty(CHUNK, QUERIES * WIDTH))
