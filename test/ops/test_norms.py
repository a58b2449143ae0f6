from __future__ import annotations

import pytest
import torch

from flashrt_ros.ops import ShapeError
from flashrt_ros.ops.norms import gated_residual_ada_rms_norm, layer_norm, residual_rms_norm
from test.ops.forbid import random

EPS = 1e-6


def rms_normalised(x: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + EPS).sqrt()


def test_layer_norm_may_write_over_its_input() -> None:
    x, weight, bias = random(5, 8), random(8, seed=1), random(8, seed=2)
    wide = x.double()
    deviation = wide - wide.mean(-1, keepdim=True)
    expected = deviation / (deviation.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight + bias
    layer_norm(x, weight, bias, eps=EPS, out=x)
    torch.testing.assert_close(x, expected.float())


def test_residual_rms_norm_adds_first_and_keeps_the_sum() -> None:
    residual, branch, out = random(5, 8), random(5, 8, seed=1), torch.empty(5, 8)
    total = residual + branch
    residual_rms_norm(residual, branch, eps=EPS, out=out)
    assert torch.equal(residual, total)
    torch.testing.assert_close(out, rms_normalised(total).float())


def test_residual_rms_norm_without_a_branch_leaves_the_residual_alone() -> None:
    residual, out = random(5, 8), torch.empty(5, 8)
    before = residual.clone()
    residual_rms_norm(residual, None, eps=EPS, out=out)
    assert torch.equal(residual, before)
    torch.testing.assert_close(out, rms_normalised(before).float())


def test_residual_rms_norm_may_write_over_the_branch() -> None:
    residual, branch = random(5, 8), random(5, 8, seed=1)
    total = residual + branch
    residual_rms_norm(residual, branch, eps=EPS, out=branch)
    assert torch.equal(residual, total)
    torch.testing.assert_close(branch, rms_normalised(total).float())


def test_a_row_of_zeros_stays_finite() -> None:
    out = torch.empty(1, 8)
    residual_rms_norm(torch.zeros(1, 8), None, eps=EPS, out=out)
    assert torch.equal(out, torch.zeros(1, 8))


def test_ada_rms_norm_gates_adds_scales_and_shifts() -> None:
    residual, branch, gate = random(5, 8), random(5, 8, seed=1), random(8, seed=2)
    modulation, out = random(3, 8, seed=3), torch.empty(5, 8)
    total = residual + gate * branch
    gated_residual_ada_rms_norm(residual, branch, gate, modulation, eps=EPS, out=out)
    torch.testing.assert_close(residual, total)
    expected = rms_normalised(total) * (1 + modulation[0].double()) + modulation[1].double()
    torch.testing.assert_close(out, expected.float())


def test_ada_rms_norm_does_not_use_its_own_gate() -> None:
    modulation, first, second = random(3, 8, seed=3), torch.empty(5, 8), torch.empty(5, 8)
    gated_residual_ada_rms_norm(random(5, 8), None, None, modulation, eps=EPS, out=first)
    modulation[2] = 9
    gated_residual_ada_rms_norm(random(5, 8), None, None, modulation, eps=EPS, out=second)
    assert torch.equal(first, second)


def test_sixteen_bit_sums_are_rounded_once() -> None:
    residual, branch = random(5, 256, dtype=torch.bfloat16), random(5, 256, seed=1, dtype=torch.bfloat16)
    gate, out = random(256, seed=2), torch.empty(5, 256, dtype=torch.bfloat16)
    exact = residual.double() + gate.double() * branch.double()
    gated_residual_ada_rms_norm(residual, branch, gate, torch.zeros(3, 256), eps=EPS, out=out)
    assert ((residual.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()
    torch.testing.assert_close(out.float(), rms_normalised(residual).float(), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("width", [7, 9])
def test_a_gate_of_another_width_is_refused(width: int) -> None:
    with pytest.raises(ShapeError, match=f"gated_residual_ada_rms_norm: 'gate' .*'width' must be 8 .*got {width}"):
        gated_residual_ada_rms_norm(
            random(5, 8), random(5, 8), random(width), torch.zeros(3, 8), eps=EPS, out=torch.empty(5, 8)
        )
