"""How the expert's products get to its kernel: as codes where all layers agree, otherwise decoded; their memory."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flashrt_ros.contract import SiteFormat
from flashrt_ros.ops.cuda.expert_codes import Codes
from flashrt_ros.policies.pi05 import Pi05Config, cuda_expert
from flashrt_ros.policies.pi05.cuda_expert import common_bits, expert_reports, pack_expert, packed_expert_bytes
from flashrt_ros.policies.pi05.cuda_products import DECODED_ONCE, IN_REGISTERS
from flashrt_ros.policies.pi05.memory import needed_bytes
from flashrt_ros.policies.pi05.weights import Dense, ExpertWeights, GemmaLayer
from flashrt_ros.precision.packed import PackedWeight

SHAPES = {"qkv": (2560, 1024), "output": (1024, 2048), "gate_up": (8192, 1024), "down": (1024, 4096)}
LAYERS, CHUNK = 2, 10


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 32).bfloat16()


def packed(name: str, layer: int, weight: str, activation: str = "16-bit") -> Tensor:
    """A matrix of the expert, narrow where a format is given."""
    matrix = drawn(*SHAPES[name], seed=layer)
    if weight == "16-bit":
        return matrix
    scale = None if activation == "16-bit" else torch.tensor([0.02])
    return PackedWeight(matrix, SiteFormat(f"expert.{name}.{layer}", weight, activation), scale)


def expert(activation: str = "16-bit", **formats: tuple[str, str]) -> ExpertWeights:
    """Two layers, with the formats of the products that are narrow."""
    layers = [
        GemmaLayer(
            **{name: packed(name, layer, formats.get(name, ("16-bit",) * 2)[layer], activation) for name in SHAPES}
        )
        for layer in range(LAYERS)
    ]
    ends = Dense(drawn(1024, 32), drawn(1024)), Dense(drawn(32, 1024), drawn(32))
    return ExpertWeights(ends[0], tuple(layers), ends[1])


def test_every_product_has_the_bits_of_its_layers() -> None:
    weights = expert(qkv=("nvfp4", "nvfp4"), output=("e4m3", "e4m3_tensor"), gate_up=("nvfp4", "e4m3"))
    assert pack_expert(weights, CHUNK).bits == (4, 8, 16, 16)
    reports = {report.op: (report.kernel, report.reason) for report in expert_reports(weights)}
    mixed = "its layers are nvfp4 and e4m3, the expert's kernel reads all layers in one way: codes were decoded when "
    assert reports == {
        "expert.qkv": (IN_REGISTERS, ""),
        "expert.output": (IN_REGISTERS, ""),
        "expert.gate_up": (DECODED_ONCE, f"{mixed}it was built"),
    }


@pytest.mark.parametrize("layers", [("16-bit", "nvfp4"), ("e4m3", "16-bit")])
def test_a_product_with_a_wide_layer_is_decoded_as_a_whole(layers: tuple[str, str]) -> None:
    weights = expert(qkv=layers)
    (report,) = expert_reports(weights)
    assert (report.op, report.kernel) == ("expert.qkv", DECODED_ONCE)
    assert f"its layers are {layers[0]} and {layers[1]}" in report.reason
    matrices = [layer.qkv for layer in weights.layers]
    wide = [m.decode().bfloat16() if isinstance(m, PackedWeight) else m for m in matrices]
    decoded = replace(
        weights, layers=tuple(replace(layer, qkv=m) for layer, m in zip(weights.layers, wide, strict=True))
    )
    assert torch.equal(pack_expert(weights, CHUNK).project.tiles, pack_expert(decoded, CHUNK).project.tiles)


@pytest.mark.parametrize("weight", ["e4m3", "e4m3_tensor", "nvfp4"])
def test_the_kernel_gets_what_the_codes_stand_for(weight: str) -> None:
    weights = expert(output=(weight, weight), down=(weight, weight))
    made = pack_expert(weights, CHUNK)
    for layer in range(LAYERS):
        for name in ("output", "down"):
            matrix = getattr(weights.layers[layer], name)
            assert isinstance(matrix, PackedWeight)
            torch.testing.assert_close(getattr(made, name).matrix(layer), matrix.decode(), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize(("chunk", "few_rows"), [(1, True), (10, True), (16, True), (17, False), (50, False)])
def test_the_length_of_the_chunk_decides_how_down_is_packed(chunk: int, few_rows: bool) -> None:
    weights = expert()
    made = pack_expert(weights, chunk)
    assert [stream.for_few_rows for stream in made.streams] == [False, False, False, few_rows]
    assert torch.equal(made.down.matrix(1), weights.layers[1].down.float())


def test_the_layers_of_one_product_at_a_time_are_stacked(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Tensor | Codes]] = []
    stacked = cuda_expert._stacked

    def watched(matrices: Sequence[Tensor]) -> Tensor | Codes:
        assert [stack() for stack in made] == [None] * len(made)
        stack = stacked(matrices)
        made.append(weakref.ref(stack))
        return stack

    monkeypatch.setattr(cuda_expert, "_stacked", watched)
    pack_expert(expert(output=("e4m3", "e4m3"), gate_up=("nvfp4", "nvfp4")), CHUNK)
    assert len(made) == len(SHAPES)


def test_inputs_that_would_be_quantised_stay_wide_and_the_report_says_so() -> None:
    (report,) = expert_reports(expert("e4m3", down=("e4m3", "e4m3")))
    assert report.kernel == IN_REGISTERS
    assert report.reason == "the expert's kernel takes 16-bit inputs: they are not rounded to e4m3"


def test_an_expert_without_narrow_weights_has_nothing_to_report() -> None:
    assert list(expert_reports(expert())) == []


@pytest.mark.parametrize(
    ("formats", "bits"),
    [
        (("16-bit",), 16),
        (("e4m3", "e4m3_tensor"), 8),
        (("nvfp4",), 4),
        (("nvfp4", "16-bit"), 16),
        (("nvfp4", "e4m3"), 16),
    ],
)
def test_layers_that_differ_are_given_wide(formats: tuple[str, ...], bits: int) -> None:
    assert common_bits(formats) == bits


@pytest.mark.parametrize("chunk", [10, 50])
@pytest.mark.parametrize("down", [("nvfp4", "nvfp4"), ("nvfp4", "e4m3"), ("16-bit", "16-bit")])
def test_the_bytes_of_the_copy_are_known_before_it_is_made(down: tuple[str, str], chunk: int) -> None:
    weights = expert(qkv=("e4m3", "e4m3"), output=("nvfp4", "nvfp4"), down=down)
    made = sum(
        part.nbytes
        for stream in pack_expert(weights, chunk).streams
        for part in (stream.tiles, stream.factor)
        if part is not None
    )
    matrices = {
        f"expert.{name}.{layer}": torch.empty(shape, device="meta", dtype=torch.bfloat16)
        for name, shape in SHAPES.items()
        for layer in range(LAYERS)
    }
    chosen = {"qkv": ("e4m3", "e4m3"), "output": ("nvfp4", "nvfp4"), "down": down}
    formats = [
        SiteFormat(f"expert.{name}.{layer}", weight, "16-bit")
        for name, weights_of in chosen.items()
        for layer, weight in enumerate(weights_of)
        if weight != "16-bit"
    ]
    assert packed_expert_bytes(matrices, formats, LAYERS) == made


def test_a_narrow_expert_needs_less_memory() -> None:
    names = tuple(f"joint_{i}" for i in range(7))
    config = Pi05Config(views=("left", "right"), state_names=names, action_names=names, chunk=10)
    formats = [SiteFormat(f"expert.{name}.{layer}", "nvfp4", "16-bit") for name in SHAPES for layer in range(18)]
    matrices = {site.name: torch.empty(SHAPES[site.name.split(".")[1]], device="meta") for site in formats}
    values = 18 * sum(outputs * inputs for outputs, inputs in SHAPES.values())
    narrow, wide = packed_expert_bytes(matrices, formats, 18), packed_expert_bytes(matrices, [], 18)
    assert wide == 2 * values
    assert narrow == values * 9 // 16 + 4 * 18 * sum(outputs for outputs, _ in SHAPES.values())
    assert needed_bytes(config) - needed_bytes(replace(config, fused=False)) == wide
