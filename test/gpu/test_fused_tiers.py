"""The fused stages of vision and prefix in every tier: against packed references and float32, equal bits, refusals."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flashrt_ros.contract import SiteFormat
from flashrt_ros.ops import reference_ops
from flashrt_ros.ops.cuda import gemm
from flashrt_ros.ops.cuda import prefix_attention as prefixes
from flashrt_ros.ops.cuda.head_codes import HeadCodes
from flashrt_ros.ops.cuda.rows import Quantiser
from flashrt_ros.ops.report import KernelReport
from flashrt_ros.policies.pi05.cuda_attention import IMAGE
from flashrt_ros.policies.pi05.cuda_attention import PREFIX as ATTENTION
from flashrt_ros.policies.pi05.cuda_plan import LARGEST_DISTANCE, ChosenStages, choose_stages
from flashrt_ros.policies.pi05.cuda_products import (
    DECODED_ONCE,
    IN_REGISTERS,
    CodesProduct,
    DecodedProduct,
    LibraryProduct,
    PackedProduct,
    as_codes,
    quantised,
)
from flashrt_ros.policies.pi05.cuda_tiers import FUSED, GATE_UP
from flashrt_ros.policies.pi05.stages import Pi05Stages
from flashrt_ros.precision.ops import packed_linear, tier_ops
from flashrt_ros.precision.packed import PackedWeight
from flashrt_ros.precision.tier import Fidelity, Rule, Tier, load_tier
from test.gpu.fused import DEVICE, Model, decide, distance, in_tier, model, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]
PARTS = ("vision", "prefix")
VISION = {"vision.qkv": "fp8", "vision.output": "fp8", "vision.up": "fp8", "vision.down": "fp8, 3 parts"}
PREFIX = {"prefix.qkv": "fp8", "prefix.output": "fp8", "prefix.gate_up": "fp8", "prefix.down": "fp8, 4 parts"}
EXPERT = dict.fromkeys(("expert.qkv", "expert.output", "expert.gate_up", "expert.down"), IN_REGISTERS)
WIDE = ("*", "16-bit", "16-bit")


def mixed(*rules: tuple[str, str, str]) -> Tier:
    """A tier of one's own, 16-bit where no rule says else."""
    made = tuple(Rule(sites, weight, activation, "a test") for sites, weight, activation in (*rules, WIDE))
    return Tier("mixed", Fidelity(0.99, 0.9), made)


TIERS = {
    "8-bit": load_tier("8-bit"),
    "4-bit-expert": load_tier("4-bit-expert"),
    "4-bit": load_tier("4-bit"),
    # One narrow layer between wide ones, and every format in one layer.
    "one layer": mixed(("vision.*.1", "e4m3", "e4m3"), ("prefix.qkv.1", "e4m3", "e4m3")),
    "the other": mixed(("vision.*.0", "e4m3", "e4m3"), ("prefix.*.0", "e4m3", "e4m3")),
    "every format": mixed(
        ("*.qkv.*", "nvfp4", "e4m3"), ("*.output.0", "e4m3_tensor", "e4m3"), ("prefix.down.0", "e4m3", "e4m3"),
        ("vision.up.0", "e4m3", "16-bit"), ("vision.down.*", "e4m3", "e4m3"), ("vision.up.1", "e4m3", "e4m3"),
    ),
    "narrow expert": mixed(("expert.*", "nvfp4", "16-bit")),
    "wide hidden": mixed(("prefix.gate_up.0", "e4m3", "e4m3"), ("vision.up.*", "e4m3", "e4m3")),
}  # fmt: skip


@lru_cache(maxsize=len(TIERS))
def narrow(name: str) -> Model:
    return in_tier(TIERS[name])


def chosen(made: Model, **switches: bool) -> tuple[Pi05Stages, tuple[KernelReport, ...]]:
    ops = tier_ops(reference_ops())
    return choose_stages(made.config, made.weights, ops, made.contract, DEVICE, **switches)


def ways(reports: tuple[KernelReport, ...]) -> dict[str, str]:
    """How each kind of product is multiplied."""
    attentions = (IMAGE, ATTENTION)
    return {report.op: report.kernel for report in reports if "." in report.op and report.op not in attentions}


@pytest.mark.parametrize("name", TIERS)
def test_vision_and_prefix_are_fused_and_as_close_to_float32_as_the_packed_references(name: str) -> None:
    made, exact = narrow(name), model("float32")
    stages, reports = chosen(made)
    assert [(r.op, r.kernel, r.reason) for r in reports[:2]] == [(part, FUSED, "") for part in PARTS]
    for seed, tokens in ((1, 190), (2, 33), (3, 200)):
        truth = decide(reference(exact), exact, seed, tokens)
        plain, fused = decide(reference(made), made, seed, tokens), decide(stages, made, seed, tokens)
        for part in PARTS:
            # Two ways to round: each has noise of its own, which a chain of codes makes nearly as large as their error.
            assert distance(fused[part], truth[part]) <= 1.2 * distance(plain[part], truth[part]) + 1e-3, part


@pytest.mark.parametrize(("name", "layers"), [("8-bit", None), ("the other", 1), ("4-bit", 0), ("wide hidden", 0)])
def test_attention_multiplies_codes_where_its_operands_are(
    name: str, layers: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, calls = narrow(name), []
    stages, _ = chosen(made)
    kernel = prefixes.prefix_attention_of_codes

    def counted(codes: HeadCodes, *args: Any, **keywords: Any) -> None:
        calls.append(codes)
        kernel(codes, *args, **keywords)

    monkeypatch.setattr(prefixes, "prefix_attention_of_codes", counted)
    decide(stages, made)
    assert len(calls) == (made.config.layers - 1 if layers is None else layers)


def test_the_report_says_how_every_product_is_multiplied() -> None:
    assert ways(chosen(narrow("8-bit"))[1]) == VISION | PREFIX | EXPERT
    assert ways(chosen(narrow("4-bit-expert"))[1]) == VISION | PREFIX | EXPERT
    four = chosen(narrow("4-bit"))[1]
    assert ways(four) == VISION | dict.fromkeys(PREFIX, "decoded") | EXPERT
    assert {report.reason for report in four if report.kernel == "decoded"} == {
        "no tensor cores take nvfp4 x e4m3: weights are decoded each time"
    }
    layer = chosen(narrow("one layer"))[1]
    assert ways(layer) == VISION | {"prefix.qkv": "fp8"}
    assert [report.kernel for report in layer if report.op == GATE_UP] == [FUSED]  # of the layer that is 16-bit
    assert ways(chosen(narrow("wide hidden"))[1])["prefix.down"] == "cublaslt"


def test_the_expert_runs_fused_and_says_how_it_reads_its_weights() -> None:
    unrounded = "the expert's kernel takes 16-bit inputs: they are not rounded to e4m3"
    for name, reason in (("8-bit", unrounded), ("4-bit-expert", ""), ("narrow expert", "")):
        reports = {report.op: report for report in chosen(narrow(name))[1]}
        assert reports["expert"].kernel == FUSED
        assert (reports["expert.down"].kernel, reports["expert.down"].reason) == (IN_REGISTERS, reason)
    reports = {report.op: report for report in chosen(narrow("every format"))[1]}
    assert reports["expert.qkv"].kernel == IN_REGISTERS
    assert reports["expert.output"].kernel == DECODED_ONCE
    assert "its layers are e4m3_tensor and 16-bit" in reports["expert.output"].reason


def test_an_expert_that_alone_is_narrow_gives_what_its_packed_reference_gives() -> None:
    made = narrow("narrow expert")
    stages = chosen(made)[0]
    for seed in (1, 2):
        got, expected = decide(stages, made, seed)["expert"], decide(reference(made), made, seed)["expert"]
        assert distance(got, expected) < LARGEST_DISTANCE


@pytest.mark.parametrize("name", ["8-bit", "4-bit", "every format", "wide hidden"])
def test_overlap_changes_no_bit(name: str) -> None:
    made = narrow(name)
    usual, other = chosen(made, overlap=True)[0], chosen(made, overlap=False)[0]
    for seed in range(3):
        expected, got = decide(usual, made, seed), decide(other, made, seed)
        assert all(torch.equal(got[part], expected[part]) for part in PARTS)


@pytest.mark.parametrize("name", ["8-bit", "every format"])
def test_codes_of_hidden_values_lie_in_whole_lines_with_zeros_behind_them(name: str) -> None:
    made = narrow(name)
    stages, width = chosen(made)[0], made.config.vision_hidden
    assert isinstance(stages, ChosenStages)
    stages._hidden.fill_(float("nan"))
    decide(stages, made)
    codes = as_codes(stages._hidden)  # the last layer of both tiers writes them
    assert codes.shape[1] == 4352
    assert not codes[:, width:].float().any()
    assert codes.float().isfinite().all()
    for mine, layer in zip(stages._vision_layers, made.weights.vision.layers, strict=True):
        wider, stored = mine.down.weight, layer.down.weight
        assert isinstance(wider, PackedWeight)
        assert isinstance(stored, PackedWeight)
        assert wider.codes.data_ptr() == stored.codes.data_ptr()
        assert stored.codes.stride() == (4352, 1)


@pytest.mark.parametrize("name", ["8-bit", "4-bit"])
def test_replays_of_one_graph_give_equal_bits_and_those_of_single_stages(name: str) -> None:
    made = narrow(name)
    stages = chosen(made, overlap=True)[0]
    arena, variant = made.arena()
    with torch.inference_mode():
        for _ in range(2):
            for body in (stages.checkpoint, stages.prompt, stages.vision, stages.prefix):
                body(arena, variant)
        first = arena["key_value"].clone()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            stages.context(arena, variant)
    assert torch.isfinite(first[:, :, : variant.dims["prefix"]]).all()
    for _ in range(100):
        arena["key_value"].fill_(float("nan"))
        graph.replay()
        live = slice(0, variant.dims["prefix"])
        assert torch.equal(arena["key_value"][:, :, live], first[:, :, live])


def test_nvfp4_activations_leave_their_part_to_the_reference() -> None:
    stages, reports = chosen(in_tier(load_tier("4-bit-blackwell")))
    assert [report.kernel for report in reports[:3]] == [FUSED, "reference", FUSED]  # vision, prefix, expert
    assert reports[1].reason == "did not run: site 'prefix.qkv.0': no kernel multiplies nvfp4 x nvfp4"
    assert isinstance(stages, ChosenStages)
    assert stages.refused == {"prefix"}
    assert ways(reports) == VISION | EXPERT


def test_a_wrong_product_of_codes_is_found_by_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gemm.product

    def wrong(x: Tensor, weight: Tensor, *, out: Tensor, behind: gemm.Behind, **keywords: Any) -> None:
        right(x, weight, out=out, behind=replace(behind, factor=None), **keywords)

    monkeypatch.setattr(gemm, "product", wrong)
    made = narrow("8-bit")
    stages, reports = chosen(made)
    assert [report.kernel for report in reports[:2]] == ["reference", "reference"]
    assert all("self-test" in report.reason for report in reports[:2])
    assert reports[2].kernel == FUSED  # the expert has a kernel of its own
    assert ways(reports) == EXPERT
    got, expected = decide(stages, made), decide(reference(made), made)
    assert all(torch.equal(got[part], expected[part]) for part in PARTS)


# -- single products ---------------------------------------------------------------------------------------------------


def packed(weight: str, activation: str, outputs: int, inputs: int) -> PackedWeight:
    matrix = torch.randn(outputs, inputs, device=DEVICE) * inputs**-0.5
    scale = None if activation == "16-bit" else torch.full((1,), 0.02, device=DEVICE)
    return PackedWeight(matrix.bfloat16(), SiteFormat("prefix.qkv.0", weight, activation), scale)


def made_of(weight: PackedWeight, bias: Tensor | None, kind: type[PackedProduct]) -> PackedProduct:
    if kind is CodesProduct:
        return CodesProduct(weight, bias, True, 4)
    return kind(weight, bias, True, "")


WAYS = [
    ("e4m3", "e4m3", CodesProduct),
    ("e4m3", "e4m3", LibraryProduct),
    ("e4m3_tensor", "e4m3", LibraryProduct),
    ("nvfp4", "e4m3", DecodedProduct),
    ("nvfp4", "16-bit", DecodedProduct),
    ("e4m3", "16-bit", DecodedProduct),
    ("e4m3_tensor", "16-bit", DecodedProduct),
]


@pytest.mark.parametrize(("weight", "activation", "kind"), WAYS)
@pytest.mark.parametrize("rows", [7, 512, 712])
def test_every_way_to_multiply_is_the_packed_reference(
    weight: str, activation: str, kind: type[PackedProduct], rows: int
) -> None:
    outputs, inputs = 8192, 2048
    then = Quantiser(torch.full((1,), 0.05, device=DEVICE))
    matrix, bias = packed(weight, activation, outputs, inputs), torch.randn(outputs, device=DEVICE).bfloat16()
    x = torch.randn(rows, inputs, device=DEVICE).bfloat16()
    wide, plain = (torch.empty(rows, outputs, device=DEVICE) for _ in range(2))
    packed_linear(x, matrix, bias, out=wide)
    packed_linear(x, matrix, out=plain)
    with_bias, without = made_of(matrix, bias, kind), made_of(matrix, None, kind)
    entering = quantised(x, with_bias.quantiser, True)
    room = 4 * 1024 if kind is CodesProduct else rows + 900  # parts of K, or several slices of decoded weights
    spare = torch.empty(room * outputs, device=DEVICE, dtype=torch.bfloat16)

    out = torch.full((rows, outputs), float("nan"), device=DEVICE).bfloat16()
    with_bias.linear(entering, out, spare)
    assert distance(out.double(), wide.double()) < 1e-2
    branch = with_bias.branch(entering, spare)
    total = branch[:, :rows].double().sum(0) if branch.ndim == 3 else branch.double()
    assert distance(total, wide.double()) < 1e-2

    def value(hidden: Tensor) -> Tensor:
        return hidden.double() * (then.scale if hidden.dtype == gemm.CODES else 1.0)

    gelu, (gate, up) = F.gelu(wide, approximate="tanh"), plain.chunk(2, dim=1)
    geglu = F.gelu(gate, approximate="tanh") * up
    for to_codes in (None, then):
        bound = 1.2e-2 if to_codes is None else 4e-2  # one rounding to E4M3 is 2.6e-2
        hidden = torch.full((rows, outputs), float("nan"), device=DEVICE).bfloat16()
        assert distance(value(with_bias.gelu(entering, hidden, spare, to_codes)), gelu.double()) < bound
        half = torch.full((rows, outputs // 2), float("nan"), device=DEVICE).bfloat16()
        assert distance(value(without.geglu(entering, half, spare, to_codes)), geglu.double()) < bound
