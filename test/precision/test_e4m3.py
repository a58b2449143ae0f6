"""FP8 E4M3 against its definition, code by code, and against ml_dtypes."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flashrt_ros.precision import e4m3
from flashrt_ros.precision.errors import PrecisionError

CODES = torch.arange(256, dtype=torch.uint8)
NAN = (0x7F, 0xFF)


def defined(code: int) -> float:
    """The value of a code by the definition of the format."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def nearest(x: float) -> int:
    """The code of a finite value: nearest, ties to the even code, saturating."""
    magnitude = min(abs(x), 448.0)
    code = min(range(0x7F), key=lambda c: (abs(defined(c) - magnitude), c & 1))
    return code | (0x80 if math.copysign(1, x) < 0 else 0)


def of_ml_dtypes(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def test_every_code_decodes_to_its_definition() -> None:
    values = e4m3.decode(CODES).tolist()
    assert [code for code, value in enumerate(values) if math.isnan(value)] == list(NAN)
    assert all(value == defined(code) for code, value in enumerate(values) if code not in NAN)
    assert math.copysign(1, values[0x80]) == -1


def test_every_code_survives_a_round_trip() -> None:
    assert torch.equal(e4m3.encode(e4m3.decode(CODES)) | 0, torch.where(e4m3.decode(CODES).isnan(), CODES, CODES))


def midpoints() -> Tensor:
    """Every tie between two neighbours, and the floats next to it on both sides."""
    values = e4m3.decode(CODES[:0x7F])
    ties = (values[:-1] + values[1:]) / 2
    below = torch.nextafter(ties, torch.tensor(0.0))
    above = torch.nextafter(ties, torch.tensor(1e9))
    return torch.cat((ties, below, above))


@pytest.mark.parametrize("sign", [1, -1])
def test_ties_go_to_the_even_code_and_neighbours_to_the_nearest(sign: int) -> None:
    x = sign * midpoints()
    got = e4m3.encode(x)
    assert got.tolist() == [nearest(value) for value in x.tolist()]
    assert np.array_equal(got.numpy(), of_ml_dtypes(x.numpy()))


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=64))
def test_any_float_is_encoded_to_the_nearest_code(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    got = e4m3.encode(x)
    assert got.tolist() == [nearest(value) for value in x.tolist()]
    inside = np.clip(x.numpy(), -448, 448)
    assert np.array_equal(got.numpy(), of_ml_dtypes(inside))


@pytest.mark.parametrize("value", [448.0, 449.0, 464.0, 1e30, math.inf])
def test_what_is_too_large_saturates(value: float) -> None:
    assert e4m3.encode(torch.tensor([value, -value])).tolist() == [0x7E, 0xFE]


def test_a_nan_stays_visible() -> None:
    assert bool(e4m3.decode(e4m3.encode(torch.tensor([math.nan]))).isnan())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_encoded_like_the_same_float(dtype: torch.dtype) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(e4m3.encode(x), e4m3.encode(x.float()))


def test_zeros_under_a_scale_stay_zeros() -> None:
    scale = e4m3.scale_for(torch.zeros(1))
    assert scale.item() == 1
    assert e4m3.quantise(torch.zeros(3), scale).tolist() == [0, 0, 0]


@given(st.floats(min_value=0, width=32, allow_nan=False, allow_infinity=False))
def test_a_scale_holds_its_largest_value_without_nan(largest: float) -> None:
    scale = e4m3.scale_for(torch.tensor([largest]))
    back = e4m3.decode(e4m3.quantise(torch.tensor([largest, 0.0]), scale)) * scale
    assert bool(back.isfinite().all())
    if largest > 1e-25:
        assert back[0].item() == pytest.approx(largest, rel=1e-5)


def test_a_scale_for_each_output_follows_its_row() -> None:
    weight = torch.randn(8, 32) * torch.logspace(-3, 3, 8)[:, None]
    codes, scales = e4m3.quantise_weight(weight, by_channel=True)
    assert scales.shape == (8,)
    error = (e4m3.decode(codes) * scales[:, None] - weight).norm(dim=1) / weight.norm(dim=1)
    assert float(error.max()) < 0.04
    _, one = e4m3.quantise_weight(weight, by_channel=False)
    assert one.shape == (1,)


@pytest.mark.parametrize("by_channel", [True, False])
def test_a_large_weight_is_quantised_in_pieces_with_equal_bits(by_channel: bool) -> None:
    weight = torch.randn(5000, 8, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 5000)[:, None]
    codes, scales = e4m3.quantise_weight(weight, by_channel=by_channel)
    largest = weight.abs().amax(1) if by_channel else weight.abs().amax().reshape(1)
    assert torch.equal(scales, e4m3.scale_for(largest))
    assert torch.equal(codes, e4m3.quantise(weight, scales[:, None] if by_channel else scales))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("by_channel", [True, False])
def test_a_weight_that_is_not_finite_is_refused(bad: float, by_channel: bool) -> None:
    weight = torch.ones(2, 4)
    weight[1, 2] = bad
    with pytest.raises(PrecisionError, match="not finite.*check the checkpoint"):
        e4m3.quantise_weight(weight, by_channel=by_channel)
