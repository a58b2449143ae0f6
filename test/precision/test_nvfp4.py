"""NVFP4: scales and codes against its definition, computed another way with ml_dtypes."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flashrt_ros.precision import e2m1, e4m3, nvfp4
from flashrt_ros.precision.errors import PrecisionError


def drawn(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def by_definition(x: np.ndarray, scale: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Codes uint8[rows, columns] and block scales uint8[rows, blocks], with ml_dtypes' roundings."""
    blocks = x.reshape(len(x), -1, nvfp4.BLOCK)
    wanted = np.abs(blocks).max(-1) * (np.float32(1) / (scale * np.float32(6)))
    wanted = np.where(wanted > 0, np.clip(wanted, 2.0**-9, 448), 0).astype(np.float32)
    scales = wanted.astype(ml_dtypes.float8_e4m3fn)
    step = scales.astype(np.float32) * scale
    with np.errstate(divide="ignore"):
        inverse = np.where(step > 0, np.float32(1) / step, np.float32(0)).astype(np.float32)
    codes = (blocks * inverse[..., None]).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return codes.reshape(x.shape), scales.view(np.uint8)


@pytest.mark.parametrize("spread", [1.0, 1e-3, 1e4])
def test_codes_and_scales_are_those_of_the_definition(spread: float) -> None:
    x = drawn(7, 96) * spread * torch.logspace(-2, 2, 7)[:, None]
    scale = nvfp4.tensor_scale_for(x.abs().max())
    got = nvfp4.quantise(x, scale)
    codes, scales = by_definition(x.numpy(), np.float32(scale.item()))
    assert np.array_equal(got.scales.numpy(), scales)
    assert np.array_equal(e2m1.unpack(got.packed).numpy(), codes)


def test_a_value_is_code_times_block_scale_times_tensor_scale() -> None:
    stored = nvfp4.Nvfp4(
        packed=torch.tensor([[0x72] + [0] * 7 + [0x09] + [0] * 7], dtype=torch.uint8),
        scales=torch.tensor([[0x38, 0x40]], dtype=torch.uint8),  # 1 and 2
        tensor_scale=torch.tensor([0.5]),
        columns=32,
    )
    values = stored.decode()[0]
    assert values[:2].tolist() == [0.5, 3.0]  # 1 * 1 * 0.5, 6 * 1 * 0.5
    assert values[16].item() == -0.5  # -0.5 * 2 * 0.5
    assert int((values != 0).sum()) == 3


def test_the_largest_value_of_a_tensor_is_exact() -> None:
    x = drawn(4, 64)
    x[2, 5] = 40.0
    back = nvfp4.quantise(x, nvfp4.tensor_scale_for(x.abs().max())).decode()
    assert back[2, 5].item() == pytest.approx(40.0, rel=1e-6)


def test_rows_that_are_no_whole_blocks_are_padded_with_zeros() -> None:
    x = drawn(3, 20)
    stored = nvfp4.quantise(x, nvfp4.tensor_scale_for(x.abs().max()))
    assert stored.packed.shape == (3, 16)
    assert stored.scales.shape == (3, 2)
    assert not e2m1.unpack(stored.packed)[:, 20:].any()
    assert stored.decode().shape == (3, 20)


def test_zeros_stay_zeros_and_make_no_nan() -> None:
    stored = nvfp4.quantise(torch.zeros(2, 32), nvfp4.tensor_scale_for(torch.tensor(0.0)))
    assert not stored.scales.any()
    assert torch.equal(stored.decode(), torch.zeros(2, 32))
    one_block = drawn(1, 32)
    one_block[:, :16] = 0
    assert torch.equal(nvfp4.quantise_weight(one_block).decode()[:, :16], torch.zeros(1, 16))


def test_a_block_far_below_the_tensor_keeps_what_it_can() -> None:
    x = torch.full((1, 32), 1e-5)
    x[0, 16:] = 448 * 6.0
    stored = nvfp4.quantise(x, nvfp4.tensor_scale_for(x.abs().max()))
    assert e4m3.decode(stored.scales)[0, 0].item() == 2.0**-9
    assert bool(stored.decode().isfinite().all())


def test_a_nan_stays_visible_in_its_block_and_nowhere_else() -> None:
    x = drawn(1, 32)
    x[0, 3] = math.nan
    back = nvfp4.quantise(x, torch.ones(1)).decode()[0]
    assert bool(back[:16].isnan().all())
    assert not bool(back[16:].isnan().any())


@given(st.integers(0, 2**31), st.floats(-18, 18))
def test_any_finite_block_comes_back_finite_and_near(seed: int, exponent: float) -> None:
    x = drawn(2, 48, seed) * 10.0**exponent
    back = nvfp4.quantise(x, nvfp4.tensor_scale_for(x.abs().max())).decode()
    assert bool(back.isfinite().all())
    assert float((back - x).norm() / x.norm()) < 0.2


def test_a_scale_that_calibration_chose_too_small_saturates() -> None:
    x = torch.full((1, 16), 100.0)
    back = nvfp4.quantise(x, torch.tensor([0.01])).decode()
    assert torch.allclose(back, torch.tensor(448 * 6 * 0.01))


def test_a_weight_takes_the_scales_that_lose_least() -> None:
    weight = drawn(64, 256)
    plain = nvfp4.quantise(weight, nvfp4.tensor_scale_for(weight.abs().max())).decode()
    chosen = nvfp4.quantise_weight(weight).decode()
    assert float((chosen - weight).norm()) < 0.9 * float((plain - weight).norm())


def test_a_weight_that_is_exact_stays_exact() -> None:
    codes = torch.randint(0, 16, (8, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    codes[:, ::16] = 7  # every block has its 6
    weight = e2m1.decode(codes) * 0.25
    assert torch.equal(nvfp4.quantise_weight(weight).decode(), weight)


def test_many_rows_are_quantised_as_few_are(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = drawn(10, 32)
    whole = nvfp4.quantise_weight(weight)
    monkeypatch.setattr(nvfp4, "_ROWS", 3)
    parts = nvfp4.quantise_weight(weight)
    assert torch.equal(whole.packed, parts.packed)
    assert torch.equal(whole.scales, parts.scales)


def test_a_weight_that_is_not_finite_is_refused() -> None:
    with pytest.raises(PrecisionError, match="not finite"):
        nvfp4.quantise_weight(torch.tensor([[math.inf] * 16]))
