"""Queries and keys rotated inside their product, against the product and the rotation by themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashrt_ros.ops import rope as rotary
from flashrt_ros.ops.cuda import gemm
from flashrt_ros.ops.cuda import rows as kernels
from flashrt_ros.ops.cuda.gemm import CODES, Behind, Heads
from flashrt_ros.ops.cuda.head_codes import HeadCodes, keys_in_order, places, values_in_order
from flashrt_ros.precision import e4m3
from test.gpu.fused import DEVICE, distance
from test.gpu.test_codes import OVERLAP, ROWS, SUMS, draw, drawn_codes, exact, factors, poisoned, quantiser

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]


def drawn_heads(rows: int, *, with_query: bool) -> tuple[Heads, list[Tensor]]:
    """Memory for results, all NaN, and what must stay so: what lies behind the rows, and beside the queries."""
    table = torch.empty(rows, 256, device=DEVICE, dtype=torch.bfloat16)
    rotary.rope_table(theta=1e4, out=table)
    (packed, behind), (key, after_key), (value, after_value) = (
        poisoned(rows, width, torch.bfloat16) for width in (2560, 256, 256)
    )
    query = packed[:, :2048].view(rows, 8, 256) if with_query else None
    kept = [behind, packed[:, 2048:] if with_query else packed, after_key, after_value]
    return Heads(table, query, key[:, None], value[:, None]), kept


def rotated(sums: Tensor, rope: Tensor, *, with_query: bool) -> list[Tensor]:
    """Queries, keys and values of packed sums, in float64; queries are no numbers without `with_query`."""
    wanted = [torch.full((sums.shape[0], count, 256), float("nan"), device=DEVICE).double() for count in (8, 1, 1)]
    rotary.split_rope_write(sums, rope, query=wanted[0] if with_query else None, key=wanted[1], value=wanted[2])
    return wanted


@OVERLAP
@pytest.mark.parametrize("with_query", [False, True])
@pytest.mark.parametrize("variant", [{}, {"TILE_ROWS": 176}, {"TILE_ROWS": 64}, {"TILE_ROWS": 120, "STAGES": 2}])
@pytest.mark.parametrize("rows", ROWS)
def test_queries_and_keys_are_rotated_behind_their_product(
    rows: int, variant: dict[str, int], with_query: bool, overlap: bool
) -> None:
    outputs = 2560 if with_query else 512
    for inputs in (2048, 144):  # 144: two steps, so that cosines come into the ring beside them
        x, weight, factor = drawn_codes(rows, inputs), drawn_codes(outputs, inputs), factors(outputs, inputs)
        heads, kept = drawn_heads(rows, with_query=with_query)
        wanted = rotated(exact(x, weight, factor), heads.rope, with_query=with_query)
        gemm.rotated_qkv(x, weight, heads, behind=Behind(factor=factor), overlap=overlap, variant=variant)
        for got, expected in zip((heads.query, heads.key, heads.value), wanted, strict=True):
            assert got is None or distance(got.double(), expected) < SUMS
        assert all(tensor.isnan().all() for tensor in kept)


def test_a_rotated_product_is_the_product_and_its_rotation() -> None:
    """Element by element, with a bias: only the rounding in between is left out."""
    rows, inputs = 712, 2048
    x, weight = drawn_codes(rows, inputs), drawn_codes(2560, inputs)
    behind = Behind(factor=factors(2560, inputs), bias=draw(2560))
    (got, _), (plain, _) = drawn_heads(rows, with_query=True), drawn_heads(rows, with_query=True)
    gemm.rotated_qkv(x, weight, got, behind=behind)
    qkv = draw(rows, 2560)
    gemm.product(x, weight, out=qkv, behind=behind)
    kernels.split_rope_write(qkv, plain.rope, query=plain.query, key=plain.key, value=plain.value)
    assert torch.equal(got.value, plain.value)
    largest = qkv.abs().max().float()
    for mine, other in ((got.query, plain.query), (got.key, plain.key)):
        assert mine is not None
        assert other is not None
        assert ((mine.float() - other.float()).abs() <= 2**-7 * (other.float().abs() + largest)).all()


@pytest.mark.parametrize("inputs", [64, 2048])
def test_a_16_bit_product_is_rotated_too(inputs: int) -> None:
    rows = 77
    x, weight = draw(rows, inputs), draw(2560, inputs, scale=inputs**-0.5)
    heads, kept = drawn_heads(rows, with_query=True)
    wanted = rotated(x.double() @ weight.double().t(), heads.rope, with_query=True)
    gemm.rotated_qkv(x, weight, heads)
    for got, expected in zip((heads.query, heads.key, heads.value), wanted, strict=True):
        assert got is not None
        assert distance(got.double(), expected) < SUMS
    assert all(tensor.isnan().all() for tensor in kept)


@OVERLAP
@pytest.mark.parametrize("variant", [{}, {"TILE_ROWS": 176}, {"TILE_ROWS": 64}, {"TILE_ROWS": 120, "STAGES": 3}])
@pytest.mark.parametrize("rows", [*ROWS, 17, 130])
def test_codes_are_those_of_the_rounded_heads(rows: int, variant: dict[str, int], overlap: bool) -> None:
    x, weight, behind = drawn_codes(rows, 2048), drawn_codes(2560, 2048), Behind(factor=factors(2560, 2048))
    plain, _ = drawn_heads(rows, with_query=True)
    gemm.rotated_qkv(x, weight, plain, behind=behind, variant=variant)
    assert plain.query is not None
    scales = torch.stack([t.float().abs().max() / 500 for t in (plain.query, plain.key, plain.value)])  # some saturate
    codes = HeadCodes.allocate(rows, scales)
    for tensor in (codes.query, codes.key, codes.value):
        tensor.view(torch.uint8).fill_(0xA5)
    heads, kept = drawn_heads(rows, with_query=False)
    gemm.rotated_qkv(x, weight, replace(heads, codes=codes), behind=behind, variant=variant, overlap=overlap)
    assert torch.equal(heads.key, plain.key)
    assert torch.equal(heads.value, plain.value)
    assert all(tensor.isnan().all() for tensor in kept)
    wanted = [
        e4m3.quantise(t, s) for t, s in zip((plain.query, plain.key[:, 0], plain.value[:, 0]), scales, strict=True)
    ]
    found = (codes.query, keys_in_order(codes.key, rows), values_in_order(codes.value, rows))
    for got, expected in zip(found, wanted, strict=True):
        assert torch.equal(got.view(torch.uint8), expected)
    unused = torch.ones(len(codes.key), dtype=torch.bool)
    unused[places(rows)] = False
    assert (codes.key.view(torch.uint8)[unused.to(DEVICE)] == 0xA5).all()


def test_replays_of_a_norm_and_a_rotated_product_give_equal_bits() -> None:
    rows, width = 712, 2048
    x, how, weight = draw(rows, width), quantiser(width), drawn_codes(2560, width)
    behind, normed = Behind(factor=factors(2560, width)), torch.empty(rows, width, device=DEVICE, dtype=CODES)
    (once, _), (often, _) = drawn_heads(rows, with_query=True), drawn_heads(rows, with_query=True)

    def body(heads: Heads, overlap: bool) -> None:
        for _ in range(3):
            kernels.residual_rms_norm(x, None, eps=1e-6, out=normed, quantiser=how, overlap=overlap)
            gemm.rotated_qkv(normed, weight, heads, behind=behind, overlap=overlap)

    body(once, False)
    body(often, True)
    torch.cuda.synchronize()
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body(often, True)
    for _ in range(100):
        for tensor in (often.query, often.key, often.value):
            assert tensor is not None
            tensor.fill_(float("nan"))
        graph.replay()
        for name in ("query", "key", "value"):
            assert torch.equal(getattr(often, name), getattr(once, name))
