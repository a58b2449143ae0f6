"""Attention of codes by its definition, and its place in a tier's op table."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashrt_ros.ops import reference_ops
from flashrt_ros.ops.attention import prefix_attention
from flashrt_ros.precision import e4m3
from flashrt_ros.precision.ops import coded_prefix_attention, tier_ops

SCALES = torch.tensor([0.02, 0.025, 0.03])


def drawn(rows: int = 50, queries: int = 4, heads: int = 2, width: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((rows, queries, width), (rows, heads, width), (rows, heads, width))
    query, key, value = (torch.randn(*size, generator=generator) for size in sizes)
    return query, key, value


def valid(count: int) -> Tensor:
    return torch.tensor([count], dtype=torch.int32)


def distance(got: Tensor, exact: Tensor) -> float:
    return float((got - exact).norm() / exact.norm())


@pytest.mark.parametrize("count", [1, 33, 50])
def test_it_is_attention_of_rounded_operands_but_for_the_rounding_of_weights(count: int) -> None:
    query, key, value = drawn()
    exact, got = torch.empty(50, 128), torch.empty(50, 128)
    q, k, v = (e4m3.decode(e4m3.quantise(x, s)) * s for x, s in zip((query, key, value), SCALES, strict=True))
    prefix_attention(q, k, v, valid(count), out=exact)
    coded_prefix_attention(query, key, value, valid(count), scales=SCALES, out=got)
    assert distance(got, exact) < (1e-6 if count == 1 else 0.03)
    assert count == 1 or distance(got, exact) > 1e-3


def test_equal_scores_round_no_weight() -> None:
    query, key, value = drawn()
    got, exact = torch.empty(50, 128), torch.empty(50, 128)
    coded_prefix_attention(query * 0, key, value, valid(40), scales=SCALES, out=got)
    prefix_attention(query * 0, key, e4m3.decode(e4m3.quantise(value, SCALES[2])) * SCALES[2], valid(40), out=exact)
    assert distance(got, exact) < 1e-6


def test_what_stands_behind_the_valid_rows_changes_nothing() -> None:
    query, key, value = drawn()
    clean, poisoned = torch.empty(50, 128), torch.empty(50, 128)
    coded_prefix_attention(query, key, value, valid(30), scales=SCALES, out=clean)
    key[30:], value[30:] = float("nan"), float("nan")
    coded_prefix_attention(query, key, value, valid(30), scales=SCALES, out=poisoned)
    assert torch.equal(clean, poisoned)


def test_in_a_tier_scales_decide() -> None:
    query, key, value = drawn()
    ops, outs = tier_ops(reference_ops()), [torch.empty(50, 128) for _ in range(4)]
    ops.prefix_attention(query, key, value, valid(50), out=outs[0])
    prefix_attention(query, key, value, valid(50), out=outs[1])
    ops.prefix_attention(query, key, value, valid(50), scales=SCALES, out=outs[2])
    coded_prefix_attention(query, key, value, valid(50), scales=SCALES, out=outs[3])
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[2], outs[3])
    assert not torch.equal(outs[0], outs[2])
