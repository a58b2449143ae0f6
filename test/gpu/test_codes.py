"""E4M3 on Hopper: producers that write codes, products of codes, against the definitions in flashrt_ros.precision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flashrt_ros.contract import SiteFormat
from flashrt_ros.ops import norms
from flashrt_ros.ops.cuda import gemm
from flashrt_ros.ops.cuda import rows as kernels
from flashrt_ros.ops.cuda.errors import KernelError
from flashrt_ros.ops.cuda.gemm import CODES, Behind
from flashrt_ros.ops.cuda.rows import Quantiser
from flashrt_ros.precision import e4m3, nvfp4
from flashrt_ros.precision.ops import packed_linear
from flashrt_ros.precision.packed import PackedWeight
from flashrt_ros.precision.smoothing import input_scale
from test.gpu.fused import DEVICE, distance

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]
ROWS = (1, 7, 256, 512, 712, 968)
SUMS = 1e-2  # the tensor cores keep 14 bits of a sum of E4M3 products
TALL: dict[str, int] = {"CONSUMERS": 2, "TILE_ROWS": 240}
WIDE: dict[str, int] = {"CONSUMERS": 3}
LARGE: dict[str, int] = {"CONSUMERS": 3, "TILE_ROWS": 240}
LONG_RING: dict[str, int] = {**LARGE, "STAGES": 4, "CHUNKS": 5}  # beside little staged output
OVERLAP = pytest.mark.parametrize("overlap", [False, True])


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).bfloat16()


def drawn_codes(*shape: int) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * 60).to(CODES)


def quantiser(width: int, *, multiplied: bool = False, scale: float = 0.013) -> Quantiser:
    multiplier = torch.exp2(torch.randint(-3, 4, (width,), device=DEVICE).float()) if multiplied else None
    return Quantiser(torch.full((1,), scale, device=DEVICE), multiplier)


def codes_of(x: Tensor, how: Quantiser) -> Tensor:
    """As `PackedWeight.quantised_input` does it."""
    value = x.float() if how.multiplier is None else x.float() * how.multiplier
    return e4m3.quantise(value, how.scale)


def poisoned(rows: int, columns: int, dtype: torch.dtype = CODES) -> tuple[Tensor, Tensor]:
    """Rows of a larger buffer, and what lies behind them; all NaN."""
    buffer = torch.full((rows + 50, columns), float("nan"), device=DEVICE).to(dtype)
    return buffer[:rows], buffer[rows:]


def assert_untouched(behind: Tensor) -> None:
    assert behind.float().isnan().all()


def places(codes: Tensor) -> Tensor:
    """Codes counted from zero, so that neighbours differ by one; both zeros, 0x00 and 0x80, are one place."""
    codes = codes.view(torch.uint8).int()
    return torch.where(codes >= 0x80, 0x80 - codes, codes)


def assert_nearly_all_equal(got: Tensor, expected: Tensor) -> None:
    """Codes of values that may differ in the last bit of a bfloat16: a few are their neighbours, none is further."""
    got, expected = places(got), places(expected)
    assert (got - expected).abs().max() <= 1
    assert (got == expected).float().mean() > 0.99


def assert_rounded_well(got: Tensor, value: Tensor, how: Quantiser) -> None:
    """Codes that stand for `value` nearly as well as those of the reference do: truncation would be twice as far."""
    ideal = codes_of(value.bfloat16(), how).view(CODES).double() * how.scale
    assert distance(got.double() * how.scale, value) < 1.05 * distance(ideal, value)


@OVERLAP
@pytest.mark.parametrize("width", [1152, 2048])
@pytest.mark.parametrize("rows", ROWS)
def test_quantise_gives_the_bits_of_the_reference(rows: int, width: int, overlap: bool) -> None:
    x, how = draw(rows, width), quantiser(width, scale=0.004)
    x[0, :8] = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 1e30, -1e30, 1e-30, 0.5])
    out, behind = poisoned(rows, width)
    kernels.quantise(x, how, out=out, overlap=overlap)
    assert torch.equal(out.view(torch.uint8), codes_of(x, how))
    assert_untouched(behind)


def test_not_a_number_stays_visible() -> None:
    x, how = draw(3, 2048), quantiser(2048)
    x[1, 5] = float("nan")
    out, _ = poisoned(3, 2048)
    kernels.quantise(x, how, out=out)
    assert out.float().isnan().nonzero().tolist() == [[1, 5]]
    kernels.residual_rms_norm(x, None, eps=1e-6, out=out, quantiser=how)
    assert out.float().isnan().all(1).tolist() == [False, True, False]
    weight = drawn_codes(256, 2048)
    product = torch.zeros(3, 256, device=DEVICE, dtype=torch.bfloat16)
    gemm.product(out, weight, out=product)
    assert product.isnan().all(1).tolist() == [False, True, False]


@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (2048, 2048), (1152, 4304), (77, 1152)])
def test_nvfp4_is_decoded_exactly(rows: int, columns: int) -> None:
    blocks = columns // nvfp4.BLOCK
    codes = torch.randint(0, 256, (rows, columns // 2), device=DEVICE, dtype=torch.uint8)
    scales = torch.randint(0, 0x7F, (rows, blocks), device=DEVICE, dtype=torch.uint8)  # every one but NaN
    out, behind = poisoned(rows, columns, torch.bfloat16)
    kernels.decode_nvfp4(codes, scales, out=out)
    expected = nvfp4.Nvfp4(codes, scales, torch.ones(1, device=DEVICE), columns).decode()
    assert torch.equal(out.float(), expected)
    assert_untouched(behind)
    scales[0, 0] = 0x7F
    kernels.decode_nvfp4(codes, scales, out=out)
    assert out[0, : nvfp4.BLOCK].isnan().any()


@OVERLAP
@pytest.mark.parametrize("parts", [0, 1, 2, 5])
@pytest.mark.parametrize("rows", ROWS)
def test_norms_write_the_codes_of_what_they_would_have_written(rows: int, parts: int, overlap: bool) -> None:
    for width, multiplied in ((2048, True), (2048, False), (1152, False)):
        x, how = draw(rows, width, scale=3), quantiser(width, multiplied=multiplied)
        branch = draw(parts, rows + 9, width) if parts else None
        total = x.clone() if branch is None else (x.float() + branch[:, :rows].float().sum(0)).bfloat16()
        wide, (out, behind) = torch.empty_like(x), poisoned(rows, width)
        if width == 2048:
            norms.residual_rms_norm(total, None, eps=1e-6, out=wide)
            kernels.residual_rms_norm(x, branch, eps=1e-6, out=out, quantiser=how, overlap=overlap)
        else:
            weight, bias = draw(width), draw(width)
            norms.layer_norm(total, weight, bias, eps=1e-6, out=wide)
            kernels.layer_norm(
                x, weight, bias, eps=1e-6, out=out, branch=branch, quantiser=how, overlap=overlap
            )  # fmt: skip
        assert distance(x.double(), total.double()) < 1e-3  # parts are added in another order
        if parts < 2:
            assert torch.equal(x, total)
            assert_nearly_all_equal(out, codes_of(wide, how))
        assert distance(out.double(), codes_of(wide, how).view(CODES).double()) < 5e-3
        assert_untouched(behind)


def test_a_row_of_zeros_gives_zeros() -> None:
    x, how = torch.zeros(5, 2048, device=DEVICE, dtype=torch.bfloat16), quantiser(2048)
    out, _ = poisoned(5, 2048)
    kernels.residual_rms_norm(x, None, eps=1e-6, out=out, quantiser=how)
    assert not out.view(torch.uint8).any()


def exact(x: Tensor, weight: Tensor, factor: Tensor) -> Tensor:
    value: Tensor = x.double() @ weight.double().t() * factor.double()
    return value


def factors(outputs: int, inputs: int) -> Tensor:
    return torch.rand(outputs, device=DEVICE).add(0.5).div(3600 * inputs**0.5)


@OVERLAP
@pytest.mark.parametrize("variant", [{}, TALL, WIDE, LARGE, {"TILE_ROWS": 64}])
@pytest.mark.parametrize("rows", ROWS)
def test_products_of_codes(rows: int, variant: dict[str, int], overlap: bool) -> None:
    for inputs, outputs in ((2048, 2560), (4304, 1280), (128, 256), (144, 256)):
        x, weight, factor, bias = (
            drawn_codes(rows, inputs),
            drawn_codes(outputs, inputs),
            factors(outputs, inputs),
            draw(outputs),
        )
        expected = exact(x, weight, factor) + bias.double()
        out, behind = poisoned(rows, outputs, torch.bfloat16)
        gemm.product(x, weight, out=out, behind=Behind(factor=factor, bias=bias), overlap=overlap, variant=variant)
        assert distance(out.double(), expected) < SUMS
        assert_untouched(behind)


@OVERLAP
@pytest.mark.parametrize("variant", [{}, LARGE])
@pytest.mark.parametrize("parts", [2, 3, 8])
@pytest.mark.parametrize("rows", ROWS)
def test_parts_of_a_product_add_up(rows: int, parts: int, variant: dict[str, int], overlap: bool) -> None:
    inputs, outputs = 4304, 1152
    x, weight, factor, bias = (
        drawn_codes(rows, inputs),
        drawn_codes(outputs, inputs),
        factors(outputs, inputs),
        draw(outputs),
    )
    padded = gemm.parts_rows(rows, outputs, parts, DEVICE, variant)
    out = torch.full((parts, padded, outputs), float("nan"), device=DEVICE, dtype=torch.bfloat16)
    gemm.product(x, weight, out=out, behind=Behind(factor=factor, bias=bias), overlap=overlap, variant=variant)
    assert distance(out[:, :rows].double().sum(0), exact(x, weight, factor) + bias.double()) < SUMS


@OVERLAP
@pytest.mark.parametrize("rows", ROWS)
def test_activations_in_front_of_codes(rows: int, overlap: bool) -> None:
    how, inputs = Quantiser(torch.full((1,), 0.01, device=DEVICE)), 1152
    for outputs, consumers in ((4304, 2), (1024, 2), (4304, 3)):  # 4304 is no whole number of tiles
        x, weight, bias = drawn_codes(rows, inputs), drawn_codes(outputs, inputs), draw(outputs)
        factor = factors(outputs, inputs)
        value = exact(x, weight, factor) + bias.double()
        out, behind = poisoned(rows, outputs)
        gemm.product(
            x, weight, out=out, behind=Behind(factor=factor, bias=bias, gelu=True, out_scale=how.scale),
            overlap=overlap, variant={"CONSUMERS": consumers},
        )  # fmt: skip
        assert_rounded_well(out, F.gelu(value, approximate="tanh"), how)
        assert_untouched(behind)


@OVERLAP
@pytest.mark.parametrize("variant", [{}, TALL, WIDE, LARGE, LONG_RING])
@pytest.mark.parametrize("to_codes", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_geglu_of_codes(rows: int, to_codes: bool, variant: dict[str, int], overlap: bool) -> None:
    how, inputs, hidden = Quantiser(torch.full((1,), 0.01, device=DEVICE)), 2048, 4096
    x, weight, factor = drawn_codes(rows, inputs), drawn_codes(2 * hidden, inputs), factors(2 * hidden, inputs)
    gate, up = exact(x, weight, factor).chunk(2, dim=1)
    value = F.gelu(gate, approximate="tanh") * up
    out, behind = poisoned(rows, hidden, CODES if to_codes else torch.bfloat16)
    step = Behind(factor=factor, out_scale=how.scale if to_codes else None)
    gemm.gate_up_geglu(x, weight, out=out, behind=step, overlap=overlap, variant=variant)
    if to_codes:
        assert_rounded_well(out, value, how)
    else:
        assert distance(out.double(), value) < SUMS
    assert_untouched(behind)


def assert_neighbours(got: Tensor, expected: Tensor) -> None:
    """None is further from the exact code than its neighbour, and few are no equals."""
    apart = (places(got) - places(expected)).abs()
    assert apart.max() <= 1
    assert (apart > 0).double().mean() < 0.02


@pytest.mark.parametrize("geglu", [False, True])
@pytest.mark.parametrize("scale", [0.02, 0.3, 2.0])
def test_codes_behind_an_activation_are_the_exact_ones_or_their_neighbours(scale: float, geglu: bool) -> None:
    """One product a sum, so that the tensor cores round nothing: all codes times all codes, then a factor."""
    inputs, every = 128, torch.arange(256, device=DEVICE, dtype=torch.uint8).view(CODES)
    x, weight = (torch.zeros(256, inputs, device=DEVICE).to(CODES) for _ in range(2))
    x.view(torch.uint8)[:, 0], weight.view(torch.uint8)[:, 0] = every.view(torch.uint8), every.view(torch.uint8)
    behind = Behind(
        factor=torch.full((256,), 2.0**-10, device=DEVICE), out_scale=torch.full((1,), scale, device=DEVICE)
    )
    linear = exact(x, weight, torch.full((256,), 2.0**-10, device=DEVICE))
    expected = F.gelu(linear, approximate="tanh")
    out, after = poisoned(256, 256)
    if geglu:
        up = weight.view(torch.uint8)[torch.randperm(256, device=DEVICE)].view(CODES)
        behind = replace(behind, factor=torch.full((512,), 2.0**-10, device=DEVICE))
        expected = expected * exact(x, up, torch.full((256,), 2.0**-10, device=DEVICE))
        both = torch.cat((weight.view(torch.uint8), up.view(torch.uint8))).view(CODES)
        gemm.gate_up_geglu(x, both, out=out, behind=behind)
    else:
        gemm.product(x, weight, out=out, behind=replace(behind, gelu=True))
    codes, wanted = e4m3.encode(expected / scale), expected.isnan()
    assert torch.equal(out.float().isnan(), wanted)
    assert_neighbours(out.view(torch.uint8)[~wanted], codes[~wanted])
    assert_untouched(after)


@pytest.mark.parametrize("by_channel", [True, False])
def test_a_norm_and_a_product_are_the_reference_of_the_tier(by_channel: bool) -> None:
    rows, inputs, outputs = 712, 2048, 2560
    x, matrix = draw(rows, inputs), draw(outputs, inputs, scale=inputs**-0.5)
    table = SiteFormat("prefix.qkv.0", "e4m3" if by_channel else "e4m3_tensor", "e4m3")
    multiplier = torch.exp2(torch.randint(-3, 4, (inputs,), device=DEVICE).float())
    normed, expected, out = torch.empty_like(x), draw(rows, outputs), draw(rows, outputs)
    norms.residual_rms_norm(x, None, eps=1e-6, out=normed)
    scale = input_scale((normed.float() * multiplier).abs().amax(), "e4m3")
    packed = PackedWeight(matrix.float() / multiplier, table, scale, multiplier)
    packed_linear(normed, packed, out=expected)
    codes = torch.empty(rows, inputs, device=DEVICE, dtype=CODES)
    kernels.residual_rms_norm(x, None, eps=1e-6, out=codes, quantiser=Quantiser(scale, multiplier))
    factor = (packed.scales * scale).expand(outputs).contiguous()
    gemm.product(codes, packed.codes.view(CODES), out=out, behind=Behind(factor=factor))
    assert distance(out.double(), expected.double()) < SUMS


def test_replays_of_a_chain_give_equal_bits_with_and_without_overlap() -> None:
    rows, width, hidden, parts = 712, 2048, 16384, 4
    x, how = draw(rows, width), quantiser(width)
    up, down = drawn_codes(2 * hidden, width), drawn_codes(width, hidden)
    behind = Behind(factor=factors(2 * hidden, width), out_scale=torch.full((1,), 0.01, device=DEVICE))
    after = Behind(factor=factors(width, hidden))
    normed, (wide, _) = torch.empty(rows, width, device=DEVICE, dtype=CODES), poisoned(rows, hidden)
    part_rows = gemm.parts_rows(rows, width, parts, DEVICE)
    branch = torch.zeros(parts, part_rows, width, device=DEVICE, dtype=torch.bfloat16)
    residual = x.clone()

    def body(overlap: bool) -> None:
        residual.copy_(x)
        for _ in range(3):
            kernels.residual_rms_norm(residual, branch, eps=1e-6, out=normed, quantiser=how, overlap=overlap)
            gemm.gate_up_geglu(normed, up, out=wide, behind=behind, overlap=overlap)
            gemm.product(wide, down, out=branch, behind=after, overlap=overlap)

    branch.zero_()
    body(False)
    first = branch.clone()
    assert first[:, :rows].isfinite().all()
    assert first[:, :rows].any()
    torch.cuda.synchronize()
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        branch.zero_()
        body(True)
    for _ in range(200):
        graph.replay()
        assert torch.equal(branch[:, :rows], first[:, :rows])


def test_what_does_not_go_together_is_refused() -> None:
    x, weight = drawn_codes(4, 128), drawn_codes(256, 128)
    one = torch.ones(1, device=DEVICE)
    with pytest.raises(KernelError, match=f"product: 'weight' must be {CODES}"):
        gemm.product(x, draw(256, 128), out=draw(4, 256))
    with pytest.raises(KernelError, match=f"product: 'out' must be {CODES}"):
        gemm.product(x, weight, out=draw(4, 256), behind=Behind(out_scale=one))
    with pytest.raises(KernelError, match="parts of K are added by who reads them"):
        gemm.product(x, weight, out=draw(1, 256, 256), behind=Behind(gelu=True))
    with pytest.raises(KernelError, match="quantise: 'out' must be"):
        kernels.quantise(draw(4, 128), Quantiser(one), out=draw(4, 128))
    four = torch.zeros(4, 64, device=DEVICE)
    with pytest.raises(KernelError, match="decode_nvfp4: 'codes' must be uint8"):
        kernels.decode_nvfp4(four, torch.zeros(4, 8, device=DEVICE), out=draw(4, 128))
