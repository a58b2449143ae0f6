"""FP4 E2M1 against its definition and against ml_dtypes, and its packing byte by byte."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashrt_ros.precision import e2m1

CODES = torch.arange(16, dtype=torch.uint8)


def defined(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, code >> 1 & 3, code & 1
    return sign * (mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def nearest(x: float) -> int:
    magnitude = min(abs(x), 6.0)
    code = min(range(8), key=lambda c: (abs(defined(c) - magnitude), c & 1))
    return code | (8 if math.copysign(1, x) < 0 else 0)


def test_every_code_decodes_to_its_definition() -> None:
    values = e2m1.decode(CODES).tolist()
    assert values == [defined(code) for code in range(16)]
    assert values[:8] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert math.copysign(1, values[8]) == -1
    assert np.array_equal(e2m1.decode(CODES).numpy(), np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn) * 1.0)


def test_every_code_survives_a_round_trip() -> None:
    assert torch.equal(e2m1.encode(e2m1.decode(CODES)), CODES)


@pytest.mark.parametrize("sign", [1, -1])
def test_ties_go_to_the_even_code_and_neighbours_to_the_nearest(sign: int) -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    x = sign * torch.cat((ties, torch.nextafter(ties, torch.tensor(0.0)), torch.nextafter(ties, torch.tensor(9.0))))
    got = e2m1.encode(x)
    assert got.tolist() == [nearest(value) for value in x.tolist()]
    assert np.array_equal(got.numpy(), x.numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8))


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=64))
def test_any_float_is_encoded_to_the_nearest_code(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    got = e2m1.encode(x)
    assert got.tolist() == [nearest(value) for value in x.tolist()]
    assert np.array_equal(got.numpy(), x.numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8))


def test_the_even_element_is_in_the_low_bits() -> None:
    assert e2m1.pack(torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)).tolist() == [[0x21, 0x0F]]


def test_packing_is_what_numpy_and_ml_dtypes_say_two_nibbles_are() -> None:
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(1)) * 3
    nibbles = x.numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8).reshape(3, 16, 2)
    assert np.array_equal(e2m1.pack(e2m1.encode(x)).numpy(), nibbles[..., 0] + 16 * nibbles[..., 1])


@given(st.lists(st.integers(0, 255), min_size=1, max_size=40))
def test_unpacking_undoes_packing(values: list[int]) -> None:
    packed = torch.tensor(values, dtype=torch.uint8)
    codes = e2m1.unpack(packed)
    assert int(codes.max()) < 16
    assert torch.equal(e2m1.pack(codes), packed)
