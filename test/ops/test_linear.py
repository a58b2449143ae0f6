from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flashrt_ros.ops import ShapeError
from flashrt_ros.ops.flow import euler_update
from flashrt_ros.ops.linear import geglu, linear
from test.ops.forbid import random

X, WEIGHT, BIAS, RESIDUAL = random(5, 8), random(6, 8, seed=1), random(6, seed=2), random(5, 6, seed=3)


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def product(bias: bool) -> Tensor:
    value = X.double() @ WEIGHT.double().T
    return value + BIAS if bias else value


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activate", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_every_epilogue(bias: bool, activate: bool, residual: bool) -> None:
    expected = product(bias)
    expected = gelu_tanh(expected) if activate else expected
    expected = expected + RESIDUAL if residual else expected
    out = torch.empty(5, 6)
    linear(
        X,
        WEIGHT,
        BIAS if bias else None,
        activation="gelu_tanh" if activate else None,
        residual=RESIDUAL if residual else None,
        out=out,
    )
    torch.testing.assert_close(out, expected.float())


def test_the_residual_may_be_the_output() -> None:
    residual = RESIDUAL.clone()
    linear(X, WEIGHT, BIAS, residual=residual, out=residual)
    torch.testing.assert_close(residual, (product(True) + RESIDUAL).float())


def test_the_output_may_have_another_type() -> None:
    out = torch.empty(5, 6, dtype=torch.bfloat16)
    linear(X, WEIGHT, out=out)
    torch.testing.assert_close(out, product(False).bfloat16())


def test_a_weight_of_another_width_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"linear: 'weight' dimension 1 'inputs' must be 8 \(from 'x'\), got 9"):
        linear(X, random(6, 9), out=torch.empty(5, 6))


def test_a_bias_of_another_width_is_refused() -> None:
    with pytest.raises(ShapeError, match="linear: 'bias' dimension 0 'outputs' must be 6"):
        linear(X, WEIGHT, random(5), out=torch.empty(5, 6))


def test_geglu_gates_with_the_first_half() -> None:
    gate_up, out = random(5, 12), torch.empty(5, 6)
    geglu(gate_up, out=out)
    torch.testing.assert_close(out, gelu_tanh(gate_up[:, :6]) * gate_up[:, 6:])


def test_geglu_needs_twice_the_width() -> None:
    with pytest.raises(ShapeError, match="geglu: 'gate_up' dimension 1 must be 12"):
        geglu(random(5, 11), out=torch.empty(5, 6))


def test_an_euler_update_accumulates_in_place() -> None:
    x, hidden = random(5, 6), random(5, 8, dtype=torch.bfloat16)
    expected = x.double() + hidden.double() @ WEIGHT.double().T + BIAS
    euler_update(x, hidden, WEIGHT, BIAS)
    torch.testing.assert_close(x, expected.float())


def test_an_euler_update_refuses_another_number_of_actions() -> None:
    with pytest.raises(ShapeError, match="euler_update: 'weight' dimension 0 'actions' must be 7"):
        euler_update(random(5, 7), random(5, 8), WEIGHT, BIAS)
