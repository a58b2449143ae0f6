"""How each site is multiplied on a GPU, as far as it needs none: choices, refusals, memory, scales."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flashrt_ros.contract import SiteFormat
from flashrt_ros.ops import padding
from flashrt_ros.ops.cuda import gemm, rows
from flashrt_ros.ops.cuda.compiler import full_text
from flashrt_ros.ops.cuda.errors import KernelError
from flashrt_ros.ops.cuda.gemm import CODES, Behind, Heads
from flashrt_ros.ops.cuda.gemm_tiling import columns, tiling
from flashrt_ros.ops.cuda.rows import Quantiser
from flashrt_ros.ops.report import KernelReport
from flashrt_ros.policies.pi05 import cuda_plan, cuda_products
from flashrt_ros.policies.pi05.cuda_plan import kernel_identity
from flashrt_ros.policies.pi05.cuda_products import (
    PARTS_OF_K,
    CodesProduct,
    DecodedProduct,
    LibraryProduct,
    PackedProduct,
    Product,
    as_codes,
    carve,
    kind_of,
    product_of,
)
from flashrt_ros.policies.pi05.cuda_tiers import FUSED
from flashrt_ros.precision import e4m3
from flashrt_ros.precision.nvfp4 import Nvfp4
from flashrt_ros.precision.packed import PackedWeight

H200 = 132
OUTPUTS, INPUTS = 96, 64


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "unsuited", lambda _: "")


@pytest.fixture
def other_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "unsuited", lambda _: "this GPU is sm_120a")


def packed(site: str, weight: str, activation: str, multiplier: Tensor | None = None) -> PackedWeight:
    matrix = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(1)).bfloat16()
    scale = None if activation == "16-bit" else torch.tensor([0.02])
    return PackedWeight(matrix, SiteFormat(site, weight, activation), scale, multiplier)


def made(site: str, weight: str, activation: str) -> Product:
    return product_of(site, packed(site, weight, activation), None, overlap=True)


@pytest.mark.parametrize(
    ("site", "weight", "activation", "way"),
    [
        ("vision.qkv.3", "e4m3", "e4m3", "fp8"),
        ("prefix.gate_up.0", "e4m3_tensor", "e4m3", "fp8"),
        ("vision.down.0", "e4m3", "e4m3", "fp8, 3 parts"),
        ("prefix.down.11", "e4m3", "e4m3", "fp8, 4 parts"),
        ("prefix.qkv.0", "nvfp4", "e4m3", "decoded"),
        ("prefix.qkv.0", "nvfp4", "16-bit", "decoded"),
        ("prefix.qkv.0", "e4m3", "16-bit", "decoded"),
    ],
)
@pytest.mark.usefixtures("hopper")
def test_on_hopper_every_format_but_nvfp4_activations_has_a_way(
    site: str, weight: str, activation: str, way: str
) -> None:
    product = made(site, weight, activation)
    assert product.way == way
    assert bool(product.reason) == (way == "decoded")
    assert (product.quantiser is None) == (activation == "16-bit")


@pytest.mark.usefixtures("other_gpu")
def test_elsewhere_codes_go_to_the_library_and_what_is_decoded_is_refused() -> None:
    product = made("prefix.down.0", "e4m3", "e4m3")
    assert isinstance(product, LibraryProduct)
    assert (product.way, product.reason) == ("cublaslt_fp8", "this GPU is sm_120a")
    with pytest.raises(KernelError, match=r"site 'prefix\.down\.0': nvfp4 x e4m3 is decoded .*sm_120a"):
        made("prefix.down.0", "nvfp4", "e4m3")


@pytest.mark.usefixtures("hopper")
def test_nvfp4_activations_are_refused_by_site() -> None:
    with pytest.raises(KernelError, match=r"site 'prefix\.qkv\.2': no kernel multiplies nvfp4 x nvfp4"):
        made("prefix.qkv.2", "nvfp4", "nvfp4")


@pytest.mark.usefixtures("hopper")
def test_a_multiplier_that_no_norm_could_apply_is_refused_by_site() -> None:
    weight = packed("prefix.output.1", "e4m3", "e4m3", torch.ones(INPUTS))
    with pytest.raises(KernelError, match=r"site 'prefix\.output\.1': its input does not come from a norm"):
        product_of("prefix.output.1", weight, None, overlap=True)
    assert made("prefix.qkv.1", "e4m3", "e4m3").quantiser is not None


@pytest.mark.usefixtures("hopper")
def test_16_bit_sites_of_the_table_go_to_the_own_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[bool, bool]] = []
    monkeypatch.setattr(gemm, "product", lambda *_, behind, overlap, **__: calls.append((behind.gelu, overlap)))
    monkeypatch.setattr(cuda_products, "OWN_WIDE", frozenset({"vision.up"}))
    weight, bias = torch.randn(OUTPUTS, INPUTS).bfloat16(), torch.randn(OUTPUTS).bfloat16()
    product, x = product_of("vision.up.0", weight, bias, overlap=True), torch.randn(5, INPUTS).bfloat16()
    out = torch.zeros(5, OUTPUTS).bfloat16()
    product.linear(x, out, torch.empty(0))
    product.gelu(x, out, torch.empty(0), None)
    assert (product.way, calls) == ("bf16", [(False, True), (True, True)])
    other = product_of("vision.down.0", weight, bias, overlap=False)
    other.linear(x, out, torch.empty(0))
    assert (other.way, len(calls)) == ("cublaslt", 2)
    torch.testing.assert_close(out.double(), x.double() @ weight.double().t() + bias.double(), rtol=1e-2, atol=2e-2)


def test_gelu_behind_a_16_bit_product_without_a_bias_is_refused() -> None:
    x = torch.ones(2, 8)
    with pytest.raises(KernelError, match="GELU behind a 16-bit product goes with a bias"):
        cuda_products.wide_linear(x, torch.ones(8, 8), None, out=x, own=False, overlap=False, gelu=True)


@pytest.mark.usefixtures("other_gpu")
def test_elsewhere_all_16_bit_sites_go_to_cublaslt() -> None:
    assert product_of("vision.down.0", torch.ones(8, 8), None, overlap=False).way == "cublaslt"


@pytest.mark.usefixtures("hopper")
def test_a_16_bit_site_goes_to_cublaslt() -> None:
    weight, bias = torch.randn(OUTPUTS, INPUTS).bfloat16(), torch.randn(OUTPUTS).bfloat16()
    product, x = product_of("vision.up.0", weight, bias, overlap=False), torch.randn(5, INPUTS).bfloat16()
    assert (product.way, product.reason, product.quantiser) == ("cublaslt", "", None)
    out, hidden = torch.empty(5, OUTPUTS).bfloat16(), torch.empty(5, OUTPUTS).bfloat16()
    product.linear(x, out, torch.empty(0))
    assert product.gelu(x, hidden, torch.empty(0), None) is hidden
    exact = F.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(out.double(), exact, rtol=1e-2, atol=2e-2)
    torch.testing.assert_close(hidden.double(), F.gelu(exact, approximate="tanh"), rtol=1e-2, atol=2e-2)
    spare = torch.empty(5 * OUTPUTS + 3).bfloat16()
    branch = product.branch(x, spare)
    assert torch.equal(branch, out)
    assert branch.data_ptr() == spare.data_ptr()


@pytest.mark.parametrize(
    ("weight", "activation"),
    [("e4m3", "e4m3"), ("e4m3_tensor", "e4m3"), ("e4m3", "16-bit"), ("nvfp4", "e4m3"), ("nvfp4", "16-bit")],
)
@pytest.mark.usefixtures("hopper")
def test_codes_and_the_factor_behind_them_are_the_weight(weight: str, activation: str) -> None:
    product = made("prefix.qkv.0", weight, activation)
    assert isinstance(product, PackedProduct)
    stored, one = product.packed, torch.ones(1)
    nvfp4 = stored.tensor_scale is not None
    codes = Nvfp4(stored.codes, stored.scales, one, INPUTS).decode() if nvfp4 else e4m3.decode(stored.codes)
    assert torch.equal(codes.bfloat16().float(), codes)  # exact, whichever way it is multiplied
    scale = one if stored.input_scale is None else stored.input_scale
    torch.testing.assert_close(codes * product.factor[:, None], stored.decode() * scale, rtol=1e-6, atol=0)


@pytest.mark.usefixtures("hopper")
def test_a_product_of_codes_rotates_inside_and_others_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[tuple[Heads, Behind, bool]] = []
    after: list[tuple[Tensor, Tensor | None]] = []
    monkeypatch.setattr(gemm, "rotated_qkv", lambda *a, behind, overlap: inside.append((a[2], behind, overlap)))
    monkeypatch.setattr(rows, "split_rope_write", lambda *a, query, **_: after.append((a[0], query)))
    x, qkv, rope, key, value = (torch.randn(3, width).bfloat16() for width in (INPUTS, OUTPUTS, 4, 4, 4))
    heads, codes = Heads(rope, None, key, value), made("prefix.qkv.1", "e4m3", "e4m3")
    codes.heads(x.to(CODES), qkv, heads, torch.empty(0))
    assert isinstance(codes, CodesProduct)
    assert [(found is heads, step.factor is codes.factor, overlap) for found, step, overlap in inside] == [
        (True, True, True)
    ]
    weight = torch.randn(OUTPUTS, INPUTS).bfloat16()
    product_of("prefix.qkv.0", weight, None, overlap=False).heads(x, qkv, heads, torch.empty(0))
    assert [(found is qkv, query) for found, query in after] == [(True, None)]
    torch.testing.assert_close(qkv.double(), x.double() @ weight.double().t(), rtol=1e-2, atol=5e-2)
    assert len(inside) == 1


@pytest.mark.parametrize("ways", [1, 2])
@pytest.mark.usefixtures("hopper")
def test_slices_cover_every_output_once_and_fit(ways: int) -> None:
    product = made("prefix.qkv.0", "nvfp4", "16-bit")
    assert isinstance(product, DecodedProduct)
    spare = torch.empty(300 * INPUTS * ways)
    slices = list(product._slices(1000, spare, ways))
    assert [row for part in slices for row in range(part.start, part.stop)] == list(range(1000))
    assert all(ways * (part.stop - part.start) * INPUTS <= spare.numel() for part in slices)
    assert all(part.start % 128 == 0 for part in slices)
    with pytest.raises(KernelError, match="no room to decode 128 outputs of 64 inputs in 100 values"):
        product._slices(1000, torch.empty(100), ways)


def test_too_little_spare_memory_is_refused() -> None:
    with pytest.raises(KernelError, match="3 rows of 4 find no room in 11 spare values"):
        carve(torch.empty(11), 3, 4)


def test_codes_lie_in_the_first_half_of_what_they_replace() -> None:
    buffer = torch.empty(6, 32, dtype=torch.bfloat16)
    codes = as_codes(buffer)
    assert (codes.dtype, codes.shape, codes.data_ptr()) == (CODES, buffer.shape, buffer.data_ptr())
    assert codes.is_contiguous()
    codes.view(torch.uint8).fill_(0xFF)
    assert buffer.flatten()[: 3 * 32].isnan().all()


@pytest.mark.parametrize(
    ("kind", "rows", "outputs"),
    [("vision.down", 512, 1152), ("prefix.down", 712, 2048)],
)
def test_parts_fill_one_wave_of_an_h200(kind: str, rows: int, outputs: int) -> None:
    cut = tiling(rows, outputs, PARTS_OF_K[kind], H200)
    assert cut.waves == 1
    assert -(-rows // cut.rows) * -(-outputs // columns(cut.consumers)) * PARTS_OF_K[kind] > 0.8 * H200


def test_the_kind_of_a_site_has_no_layer() -> None:
    assert kind_of("prefix.gate_up.12") == "prefix.gate_up"


@pytest.mark.usefixtures("hopper")
def test_a_product_of_codes_without_its_scale_is_refused() -> None:
    weight = packed("prefix.qkv.0", "e4m3", "e4m3")
    weight.input_scale = None
    with pytest.raises(KernelError, match=r"site 'prefix\.qkv\.0': e4m3 activations without a scale"):
        cuda_products.input_quantiser(weight)
    assert isinstance(made("prefix.qkv.0", "e4m3", "e4m3"), CodesProduct)
    assert isinstance(made("prefix.qkv.0", "e4m3", "e4m3").quantiser, Quantiser)


def test_the_identity_says_how_products_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = (KernelReport("vision", FUSED), KernelReport("prefix", FUSED), KernelReport("expert", reason="none yet"))
    plain = kernel_identity(parts, "reference")
    assert plain.startswith("reference; fused vision,prefix ")
    own, library = ((*parts, KernelReport("prefix.down", way)) for way in ("fp8, 4 parts", "cublaslt_fp8"))
    assert len({plain, kernel_identity(own, "reference"), kernel_identity(library, "reference")}) == 3
    assert kernel_identity(parts[2:], "reference") == "reference"
    monkeypatch.setattr(cuda_plan, "full_text", lambda source: source.name)
    assert kernel_identity(parts, "reference") != plain


def test_the_identity_says_who_multiplies_16_bits_and_with_what_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = (KernelReport("vision", FUSED),)
    found = {kernel_identity(parts, "reference")}
    monkeypatch.setattr(cuda_products, "OWN_WIDE", frozenset({"vision.up"}))
    found.add(kernel_identity(parts, "reference"))
    monkeypatch.setattr(padding, "MULTIPLE", 64)
    assert len(found | {kernel_identity(parts, "reference")}) == 3


@pytest.mark.parametrize(
    "name",
    ["expert", "gemm", "image_attention", "image_attention_wgmma", "norms", "pixels", "prefix", "prefix_attention",
     "quantise"],
)  # fmt: skip
def test_every_source_of_the_stages_is_in_the_identity(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = (KernelReport("vision", FUSED),)
    before = kernel_identity(parts, "reference")
    monkeypatch.setattr(
        cuda_plan, "full_text", lambda source: full_text(source) + ("// changed" if source.name == name else "")
    )
    assert kernel_identity(parts, "reference") != before
