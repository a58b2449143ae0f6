"""benchmarks/products.py, as far as it goes without a GPU, its committed result, and one product on a GPU."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from flashrt_ros.ops.cuda import gemm_tiling
from flashrt_ros.ops.padding import padded_size
from flashrt_ros.policies.pi05.config import Pi05Config
from flashrt_ros.policies.pi05.cuda_products import kind_of
from flashrt_ros.policies.pi05.presets import PRESETS
from flashrt_ros.policies.pi05.seeded import seeded_tensors
from flashrt_ros.policies.pi05.sites import site_matrices
from flashrt_ros.policies.pi05.source import MemorySource
from flashrt_ros.policies.pi05.weights import load_weights
from test.benchmarks.scripts import RESULTS, module, run
from test.sources import ROOT

products, subjects, gpu = module("products"), module("product_subjects"), module("_gpu")
COMMITTED: dict[str, Any] = json.loads((RESULTS / "h200_products.json").read_text())
H200 = 132
CPU = torch.device("cpu")
NAMES = {
    "vision QKV": "vision.qkv",
    "vision O": "vision.output",
    "vision up + GELU + codes": "vision.up",
    "vision down": "vision.down",
    "prefix QKV": "prefix.qkv",
    "prefix O": "prefix.output",
    "prefix gate‖up + GeGLU + codes": "prefix.gate_up",
    "prefix down": "prefix.down",
}


def subject(behind: str, operands: str = "e4m3", bias: bool = False) -> Any:
    product = subjects.Product("site", 48, 256, 512, 2, operands, behind, bias)
    return subjects.Subject(product, CPU, torch.Generator().manual_seed(0))


def test_an_unknown_site_is_refused_with_those_that_there_are() -> None:
    found = run("products", "--only", "vision.qkv,vision.middle")
    assert found.returncode == 2
    assert "unknown site 'vision.middle'; there are: vision.qkv, vision.output, vision.up," in found.stderr


def test_the_committed_result_is_shown() -> None:
    found = run("products", "--show")
    assert found.returncode == 0, found.stderr
    lines = [line.split() for line in found.stdout.splitlines()]
    for product in COMMITTED["products"]:
        (line,) = [line for line in lines if line[:2] == [product["site"], product["operands"]]]
        best = min(way["us"] for way in product["variants"] if way["by"] == "own" and "us" in way)
        assert float(line[7]) == pytest.approx(best, rel=1e-3)
        assert line[3:5] == [str(product["in_use"]["tile_rows"]), str(product["in_use"]["parts"])]
    assert len([line for line in lines if line and line[0] == "quantise"]) == 4


def test_every_product_of_vision_and_prefix_is_there_with_its_true_shape() -> None:
    config = Pi05Config(**PRESETS["pi05_tiny"])
    weights = load_weights(MemorySource(seeded_tensors(config, 1), config, "test"), config, CPU)
    expected: dict[str, set[tuple[int, int]]] = {}
    for site, matrix in site_matrices(weights).items():
        kind, (outputs, inputs) = kind_of(site), matrix.shape
        if kind == "vision.up":
            outputs = padded_size(outputs)
        if kind == "vision.down":
            inputs = padded_size(inputs)
        expected.setdefault(kind, set()).add((outputs, inputs))
    found = {product.site: (product.outputs, product.inputs) for product in subjects.products(config)}
    assert {site for site in expected if site.split(".")[0] in ("vision", "prefix")} - set(found) == {"prefix"}
    assert all(found[site] in expected[site] for site in found)
    layers = {product.site: product.layers for product in subjects.products(config)}
    assert layers["vision.up"] == config.vision_layers
    assert layers["prefix.down"] == config.layers - 1  # the last one only makes keys and values


@pytest.mark.parametrize("product", subjects.products(), ids=lambda p: f"{p.site} {p.operands}")
def test_variants_fit_a_block_and_include_what_is_in_use(product: Any) -> None:
    variants = list(product.variants(H200))
    assert product.in_use(H200) in variants
    assert len({tuple(variant.items()) for variant in variants}) == len(variants)
    for variant in variants:
        tile, geglu = variant["tile_rows"], int(product.behind == "geglu")
        defines = {"TILE_ROWS": tile, "CONSUMERS": variant["consumers"], "GEGLU": geglu, "OUT8": int(product.to_codes)}
        ring = variant.get("stages") or gemm_tiling.stages(defines)
        assert gemm_tiling.shared_bytes({**defines, "STAGES": ring}) <= gemm_tiling.SHARED_BYTES
        assert tile % 8 == 0


@pytest.mark.parametrize("behind", ["gelu", "geglu"])
def test_drawn_results_do_not_saturate_their_codes(behind: str) -> None:
    drawn = subject(behind)
    assert drawn.exact.abs().max() <= 448 * drawn.behind.out_scale * (1 + 1e-6)
    # A uniform error of half a step of three bits is 1/16/√3 of the mantissa, which lies between 1 and 2.
    assert 0.02 < drawn.rounding_error() < 0.03


def test_drawn_sums_have_a_deviation_of_about_one() -> None:
    for drawn in (subject(""), subject("geglu")):
        assert 0.5 < (drawn.sums * drawn.behind.factor.double()).std() < 2


def test_the_error_of_a_bfloat16_product_is_one_rounding() -> None:
    drawn = subject("", "bf16")
    (candidate,) = products.library_candidates(drawn)
    candidate.body(1)
    assert candidate.error() > 1  # of another layer
    candidate.body(0)
    assert candidate.error() == pytest.approx(1.66e-3, rel=0.05)


def test_the_distance_of_a_flow_is_from_its_origin() -> None:
    origin, exact = torch.full((4,), 10.0), torch.full((4,), 12.0)
    assert gpu.distance(exact + 1, exact, origin) == pytest.approx(0.5)
    assert gpu.distance(exact + 1, exact) == pytest.approx(1 / 12)


def test_only_an_h200_writes_its_result() -> None:
    assert gpu.result_name("products", "NVIDIA H200") == "h200_products"
    assert gpu.result_name("products", "NVIDIA H100 80GB HBM3") == "products_nvidia_h100_80gb_hbm3"


def test_committed_errors_are_those_of_rounding() -> None:
    errors = [way["error"] for p in COMMITTED["products"] for way in p["variants"] if "error" in way]
    assert errors
    assert min(errors) > 0
    assert max(errors) < 0.03  # of codes; what saturates is much further away


def documented() -> dict[str, list[str]]:
    text = (ROOT / "docs" / "performance.md").read_text()
    section = text.partition("## Products of FP8 codes")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "|" in line]
    return {NAMES[row[0]]: row[1:] for row in rows if row[0] in NAMES}


def test_the_documented_table_is_the_committed_result() -> None:
    rows = documented()
    assert set(rows) == set(NAMES.values())
    for product in COMMITTED["products"]:
        if product["operands"] != "e4m3":
            continue
        own, tile, *library = rows[product["site"]]
        used = product["in_use"]
        assert tile == f"{used['tile_rows']}, {used['parts']}", product["site"]
        ways = [products.fastest(product, products.OWN, **used, stages=None)]
        ways += [products.fastest(product, by) for by in (products.TENSOR, products.OUTPUTS, products.BF16)]
        for text, way in zip((own, *library), ways, strict=True):
            assert float(text.split()[0]) == pytest.approx(way["us"], abs=0.0501), (product["site"], way)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
def test_a_product_is_measured() -> None:
    device = torch.device("cuda", 0)
    product = subjects.Product("site", 96, 256, 512, 2, behind="gelu", bias=True, tiles=(64, 48))
    found = products.measure_product(product, device, torch.Generator(device).manual_seed(0))
    ways = {way["by"] for way in found["variants"]}
    assert ways == {products.OWN, products.TENSOR, products.OUTPUTS, products.BF16}
    assert not [way for way in found["variants"] if "refused" in way]
    for way in found["variants"]:
        assert way["us"] > 0
        most = 1.05 * found["rounding_error"] if way["by"] == products.OWN else 1e-2
        assert way["error"] < most, way
