"""The arithmetic of GELU and GeGLU in front of codes (gelu_tanh_halves in kernels/gemm_epilogue.cuh), without a GPU.

The same steps in half precision, with the kernel's coefficients, against float64.
"""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flashrt_ros.ops.cuda.compiler import kernel_folder
from flashrt_ros.precision import e4m3

HALF_LARGEST = 65504.0
BITS = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
FINITE = BITS[BITS.isfinite()]


def coefficients() -> list[float]:
    """Those of the kernel, of |x|^0 to |x|^4; each word holds one twice."""
    text = (kernel_folder() / "gemm_epilogue.cuh").read_text()
    found = re.search(r"kCoefficients\[5\] = \{([^}]*)\}", text)
    assert found is not None
    words = [int(word, 16) for word in found.group(1).split(",")]
    assert all(word >> 16 == word & 0xFFFF for word in words)
    return [float(torch.tensor(word >> 16, dtype=torch.int32).to(torch.int16).view(torch.float16)) for word in words]


def half(value: Tensor) -> Tensor:
    """As `pack_halves` rounds: saturating, NaN stays NaN."""
    return value.double().clamp(-HALF_LARGEST, HALF_LARGEST).half()


def fma(a: Tensor, b: Tensor, c: Tensor | float) -> Tensor:
    """a * b + c in half precision, rounded once."""
    return (a.double() * b.double() + c).half()


def gelu_halves(x: Tensor, scaled: Tensor) -> Tensor:
    """`gelu_tanh_halves`, with exponentials rounded to half."""
    constant, *rest = coefficients()
    y = x.abs()
    exponent = torch.full_like(x, rest[-1])
    for coefficient in (*reversed(rest[:-1]), constant):
        exponent = fma(y, exponent, coefficient)
    sigmoid = torch.exp2(exponent.double()).half()
    positive = torch.where(scaled > 0, scaled, torch.zeros_like(scaled))  # 0 for NaN, as max.f16x2 has it
    return fma(-scaled.abs(), sigmoid, positive.double())


def gelu_codes(x: Tensor, scale: float) -> Tensor:
    inverse = torch.tensor(scale).reciprocal()
    return e4m3.encode(gelu_halves(half(x), half(x.float() * inverse)))


def geglu_codes(gate: Tensor, up: Tensor, scale: float) -> Tensor:
    inverse, x = torch.tensor(scale).reciprocal(), half(gate)
    return e4m3.encode((gelu_halves(x, x).double() * half(up.float() * inverse).double()).half())


def exact_gelu(x: Tensor) -> Tensor:
    return F.gelu(x.double(), approximate="tanh")


def exact_codes(value: Tensor, scale: float) -> Tensor:
    return e4m3.encode(value / scale)


def places(codes: Tensor) -> Tensor:
    """Codes counted from zero, so that neighbours differ by one."""
    codes = codes.int()
    return torch.where(codes >= 0x80, 0x80 - codes, codes)


def assert_neighbours(got: Tensor, expected: Tensor, share: float) -> None:
    """None is further from `expected` than its neighbour, and only that share is no equal."""
    apart = (places(got) - places(expected)).abs()
    assert apart.max() <= 1
    assert (apart > 0).double().mean() < share


@pytest.mark.parametrize("scale", [1e-4, 1e-3, 0.01, 0.02, 0.1, 1.0, 50.0])
def test_gelu_of_every_half_is_the_exact_code_or_its_neighbour(scale: float) -> None:
    assert_neighbours(gelu_codes(FINITE, scale), exact_codes(exact_gelu(FINITE), scale), 0.01)


def test_gelu_keeps_its_relative_precision() -> None:
    x = FINITE[(FINITE.abs() < 3.5) & (FINITE.abs() > 2**-6)]
    error = gelu_halves(x, x).double() / exact_gelu(x) - 1
    assert error.abs().max() < 0.007
    assert error.square().mean().sqrt() < 1e-3


@pytest.mark.parametrize("spread", [0.3, 1.0, 3.0])
def test_codes_of_drawn_values_move_no_more_than_bfloat16_moves_them(spread: float) -> None:
    gate, up = torch.randn(2, 400_000, generator=torch.Generator().manual_seed(0)) * spread
    value = exact_gelu(gate) * up.double()
    scale = float(value.abs().max()) / e4m3.LARGEST
    expected, rounded = exact_codes(value, scale), exact_codes(value.bfloat16().double(), scale)
    assert_neighbours(geglu_codes(gate, up, scale), expected, float((rounded != expected).double().mean()))
    value = exact_gelu(gate)
    scale = float(value.abs().max()) / e4m3.LARGEST
    assert_neighbours(gelu_codes(gate, scale), exact_codes(value, scale), 0.01)


@pytest.mark.parametrize("up", [0.0, 1e-9, -1e-3, 1.0, -448.0, 65504.0, -65504.0])
def test_geglu_of_every_gate_saturates_as_the_exact_value_does(up: float) -> None:
    got = geglu_codes(FINITE, torch.full_like(FINITE.float(), up), 1.0)
    expected = exact_codes(exact_gelu(FINITE) * up, 1.0)
    value = e4m3.decode(got).double()
    assert value.isfinite().all()
    # Far gates leave multiples of the smallest half, which so large an up makes a few of the smallest codes.
    apart = (value - e4m3.decode(expected).double()).abs()
    assert (((places(got) - places(expected)).abs() <= 1) | (apart <= 0.02)).all()


def test_values_beyond_the_halves_saturate() -> None:
    far = torch.tensor([1e5, 1e30, -1e5, -1e30])
    assert e4m3.decode(gelu_codes(far, 1.0)).tolist() == [448.0, 448.0, 0.0, 0.0]
    assert e4m3.decode(geglu_codes(torch.tensor([1e30, 2.0, 2.0]), torch.tensor([0.0, 1e30, -1e30]), 1.0)).tolist() == [
        0.0, 448.0, -448.0,
    ]  # fmt: skip


def test_not_a_number_stays_visible() -> None:
    nan, one = torch.tensor([float("nan")]), torch.ones(1)
    for codes in (gelu_codes(nan, 0.1), geglu_codes(nan, one, 0.1), geglu_codes(one, nan, 0.1)):
        assert e4m3.decode(codes).isnan().all()
