"""Packed weights: what they store, what they refuse, and the product that defines a tier's kernels."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from flashrt_ros.contract import SiteFormat
from flashrt_ros.ops import OpTable, ShapeError, reference_ops
from flashrt_ros.ops.padding import padded_shape
from flashrt_ros.precision import e4m3, nvfp4
from flashrt_ros.precision.capability import require_capability
from flashrt_ros.precision.errors import PrecisionError, TierError
from flashrt_ros.precision.ops import packed_embed, packed_linear, tier_ops
from flashrt_ros.precision.packed import PackedWeight, stored_bytes
from flashrt_ros.precision.smoothing import input_scale
from test.ops.forbid import CaptureSafe

PAIRS = [
    ("e4m3", "16-bit"),
    ("e4m3", "e4m3"),
    ("e4m3_tensor", "e4m3"),
    ("nvfp4", "16-bit"),
    ("nvfp4", "e4m3"),
    ("nvfp4", "nvfp4"),
]
NEAR = {"e4m3": 0.05, "e4m3_tensor": 0.05, "nvfp4": 0.15}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def packed(weight: Tensor, form: str, activation: str, x: Tensor, multiplier: Tensor | None = None) -> PackedWeight:
    seen = x if multiplier is None else x * multiplier
    scale = None if activation == "16-bit" else input_scale(seen.abs().max(), activation)
    return PackedWeight(weight, SiteFormat("part.qkv.0", form, activation), scale, multiplier)


@pytest.mark.parametrize(("form", "activation"), PAIRS)
@pytest.mark.parametrize("inputs", [64, 40])
def test_the_product_is_near_the_wide_one(form: str, activation: str, inputs: int) -> None:
    weight, x, bias = drawn(48, inputs), drawn(6, inputs, seed=1), drawn(48, seed=2)
    residual = drawn(6, 48, seed=3)
    out, wide = torch.empty(6, 48), torch.empty(6, 48)
    stored = packed(weight, form, activation, x)
    packed_linear(x, stored, bias, activation="gelu_tanh", residual=residual, out=out)
    reference_ops().linear(x, weight, bias, activation="gelu_tanh", residual=residual, out=wide)
    assert 0 < float((out - wide).norm() / wide.norm()) < NEAR[form]


@pytest.mark.parametrize(("form", "activation"), PAIRS)
def test_the_product_is_exactly_that_of_the_decoded_operands(form: str, activation: str) -> None:
    weight, x = drawn(32, 32), drawn(4, 32, seed=1)
    stored = packed(weight, form, activation, x)
    out = torch.empty(4, 32)
    packed_linear(x, stored, out=out)
    assert torch.equal(out, torch.nn.functional.linear(stored.quantised_input(x), stored.decode()))


def test_what_is_stored_is_what_the_formats_say() -> None:
    weight, x = drawn(16, 32), drawn(4, 32)
    eight = packed(weight, "e4m3", "e4m3", x)
    codes, scales = e4m3.quantise_weight(weight, by_channel=True)
    assert torch.equal(eight.codes, codes)
    assert torch.equal(eight.scales, scales)
    four = packed(weight, "nvfp4", "nvfp4", x)
    assert torch.equal(four.decode(), nvfp4.quantise_weight(weight).decode())
    assert four.input_scale is not None
    expected = nvfp4.quantise(x, four.input_scale).decode()
    assert torch.equal(four.quantised_input(x), expected)


@pytest.mark.parametrize(("form", "activation"), PAIRS)
@pytest.mark.parametrize("inputs", [64, 40])
def test_the_bytes_are_those_that_were_counted(form: str, activation: str, inputs: int) -> None:
    stored = packed(drawn(24, inputs), form, activation, drawn(2, inputs))
    table = SiteFormat("a", form, activation)
    assert stored.stored_bytes == stored_bytes(table, 24, inputs)


@pytest.mark.parametrize(("form", "activation"), PAIRS)
@pytest.mark.parametrize("sizes", [(130, 256), (128, 72), (24, 1000)])
@pytest.mark.parametrize("multiplied", [False, True])
def test_with_zeros_it_is_the_matrix_and_zeros_behind_it(
    form: str, activation: str, sizes: tuple[int, int], multiplied: bool
) -> None:
    (outputs, inputs), x = sizes, drawn(2, sizes[1], seed=1)
    multiplier = torch.exp2(torch.arange(inputs) % 3 - 1.0) if multiplied else None
    plain = packed(drawn(*sizes), form, activation, x, multiplier)
    roomy = PackedWeight(
        drawn(*sizes), SiteFormat("part.qkv.0", form, activation), plain.input_scale, multiplier, padded=True
    )
    assert torch.equal(roomy.decode(), plain.decode())
    assert torch.equal(roomy.decode(torch.tensor([2, 0])), plain.decode(torch.tensor([2, 0])))
    assert roomy.stored_bytes == plain.stored_bytes
    wider = [weight.with_zeros() for weight in (roomy, plain)]
    assert wider[0].codes.data_ptr() == roomy.codes.data_ptr()  # no copy
    for weight in wider:
        assert (tuple(weight.shape), weight.dtype) == (padded_shape(sizes), plain.dtype)
        assert weight.codes.is_contiguous()
        assert repr(weight).startswith("PackedWeight(part.qkv.0, ")
        decoded = weight.decode()
        assert torch.equal(decoded[:outputs, :inputs], plain.decode())
        assert int((decoded != 0).sum()) == int((plain.decode() != 0).sum())
        seen = torch.nn.functional.pad(x, (0, weight.shape[1] - inputs))
        assert torch.equal(weight.quantised_input(seen)[:, :inputs], plain.quantised_input(x))
    assert roomy.codes.shape == plain.codes.shape  # it is left as it was


def test_with_zeros_a_matrix_that_fits_is_itself() -> None:
    weight = packed(drawn(128, 256), "e4m3", "16-bit", drawn(2, 256))
    assert weight.with_zeros() is weight


def test_it_has_the_shape_of_the_matrix_and_no_storage_to_misread() -> None:
    stored = packed(drawn(24, 32).bfloat16(), "nvfp4", "16-bit", drawn(2, 32))
    assert (stored.shape, stored.dtype, stored.device.type) == (torch.Size([24, 32]), torch.bfloat16, "cpu")
    assert "part.qkv.0, 24x32, weight nvfp4" in repr(stored)
    for misuse in (stored.float, stored.t, lambda: drawn(2, 32).bfloat16() @ stored, lambda: stored + 1, stored.clone):
        with pytest.raises(PrecisionError, match=r"cannot read PackedWeight\(part\.qkv\.0.*stored packed"):
            misuse()


def test_a_multiplier_cancels_where_it_is_a_power_of_two() -> None:
    weight, x = drawn(16, 32), drawn(4, 32, seed=1)
    multiplier = torch.exp2(torch.arange(32) % 3 - 1.0)
    stored = packed(weight / multiplier, "e4m3", "16-bit", x, multiplier)
    out = torch.empty(4, 16)
    packed_linear(x, stored, out=out)
    assert float((out - x @ weight.T).norm() / (x @ weight.T).norm()) < 0.05


def test_rows_of_a_table_are_looked_up() -> None:
    table, tokens, out = drawn(10, 32), torch.tensor([3, 0, -1], dtype=torch.int32), torch.empty(3, 32)
    for form in ("e4m3", "e4m3_tensor", "nvfp4"):
        stored = packed(table, form, "16-bit", table)
        packed_embed(tokens, stored, scale=2.0, out=out)
        assert torch.equal(out, stored.decode()[[3, 0, 0]] * 2)


def test_a_tier_s_ops_leave_wide_weights_to_the_ops_they_were_made_of() -> None:
    called: list[str] = []
    base = dataclasses.replace(
        OpTable(), linear=lambda *a, **k: called.append("linear"), embed=lambda *a, **k: called.append("embed")
    )
    ops, x = tier_ops(base), drawn(2, 32)
    ops.linear(x, drawn(4, 32), out=torch.empty(2, 4))
    ops.embed(torch.zeros(2, dtype=torch.int32), drawn(4, 32), scale=1.0, out=torch.empty(2, 32))
    assert called == ["linear", "embed"]
    ops.linear(x, packed(drawn(4, 32), "e4m3", "e4m3", x), out=torch.empty(2, 4))
    assert called == ["linear", "embed"]


@pytest.mark.parametrize(("form", "activation"), PAIRS)
def test_the_reference_path_can_be_captured(form: str, activation: str) -> None:
    x = drawn(2, 32)
    stored, out = packed(drawn(4, 32), form, activation, x), torch.empty(2, 4)
    packed_linear(x, stored, out=out)  # tables of a device are made once
    with CaptureSafe():
        packed_linear(x, stored, out=out)


def test_a_wrong_shape_names_the_argument() -> None:
    x = drawn(2, 48)
    with pytest.raises(ShapeError, match="packed_linear: 'weight' dimension 1 'inputs' must be 48"):
        packed_linear(x, packed(drawn(4, 32), "e4m3", "e4m3", x), out=torch.empty(2, 4))


@pytest.mark.parametrize(
    ("form", "activation", "said"),
    [
        ("fp8", "16-bit", "unknown weight format 'fp8'; there are: 16-bit, e4m3"),
        ("e4m3", "int8", "unknown activation format 'int8'"),
        ("16-bit", "e4m3", "e4m3 activations cannot meet a 16-bit weight"),
        ("e4m3", "nvfp4", "nvfp4 activations cannot meet an e4m3 weight"),
    ],
)
def test_formats_that_do_not_exist_or_do_not_fit_are_refused(form: str, activation: str, said: str) -> None:
    with pytest.raises(PrecisionError, match=f"site 'a.b': {said}"):
        PackedWeight(drawn(4, 32), SiteFormat("a.b", form, activation), torch.ones(1))


def test_an_activation_format_needs_a_scale() -> None:
    with pytest.raises(PrecisionError, match="site 'a.b': e4m3 activations need a calibrated scale"):
        PackedWeight(drawn(4, 32), SiteFormat("a.b", "e4m3", "e4m3"))


def test_a_weight_that_is_not_finite_names_the_site() -> None:
    with pytest.raises(PrecisionError, match=r"site 'a\.b': the weight holds a value that is not finite"):
        PackedWeight(torch.full((4, 32), float("nan")), SiteFormat("a.b", "nvfp4"))


def test_a_gpu_that_cannot_run_a_format_is_told_the_site() -> None:
    formats = (SiteFormat("a.b", "nvfp4", "e4m3"), SiteFormat("c.d", "nvfp4", "nvfp4"))
    require_capability(formats, (10, 0), "mine")
    require_capability(formats[:1], (8, 9), "mine")
    require_capability((SiteFormat("a.b", "nvfp4"),), (8, 0), "mine")
    with pytest.raises(TierError, match=r"tier 'mine', site 'c\.d': nvfp4 .* capability 10\.0, this GPU has 9\.0"):
        require_capability(formats, (9, 0), "mine")
    with pytest.raises(TierError, match=r"site 'a\.b': e4m3 .* 8\.9, this GPU has 8\.7"):
        require_capability(formats, (8, 7), "mine")
