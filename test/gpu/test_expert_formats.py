"""The expert's kernel with weights as codes: against float32 with what the codes stand for, repeated, every grid."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashrt_ros.ops.cuda.expert import ExpertKernel, ExpertScratch
from flashrt_ros.ops.cuda.expert_codes import Codes
from flashrt_ros.ops.cuda.expert_packing import FEW_ROWS, ExpertWeights, pack
from flashrt_ros.precision import e2m1, e4m3
from test.benchmarks.scripts import module
from test.gpu.fused import DEVICE, NEEDS_KERNELS

pytestmark = NEEDS_KERNELS

benchmark = module("expert")
PRODUCTS = ("qkv", "output", "gate_up", "down")
PREFIX = {1: 40, 10: 712, 16: 712, 30: 712, 50: 968}
LAYERS, STEPS = 2, 3
FORMATS = [(8, 8, 8, 8), (4, 4, 4, 4), (16, 8, 4, 8), (4, 4, 16, 4)]


def made(rows: int, bits: tuple[int, ...]) -> tuple[ExpertWeights, Any]:
    """Packed weights, and the expert with the values that they stand for."""
    drawn = benchmark.draw(rows, PREFIX[rows], DEVICE, LAYERS, STEPS)
    matrices: dict[str, Tensor | Codes] = {name: getattr(drawn, name) for name in PRODUCTS}
    values: dict[str, Tensor] = {}
    for name, width in zip(PRODUCTS, bits, strict=True):
        if width < 16:
            matrices[name], values[name] = benchmark.quantised(getattr(drawn, name), width)
    qkv, output, gate_up, down = matrices.values()
    weights = pack(qkv, output, gate_up, down, drawn.enter, drawn.leave, few_rows=rows <= FEW_ROWS)
    assert weights.bits == bits
    return weights, replace(drawn, **values)


def actions_of(expert: Any, weights: ExpertWeights, launches: str = "one") -> Tensor:
    """Of repeated calls, which must give equal bits."""
    call, actions = benchmark.call_of(expert, weights, launches)
    assert benchmark.equal_bits(call, actions)
    return torch.clone(actions)


@pytest.mark.parametrize("bits", FORMATS)
@pytest.mark.parametrize("rows", PREFIX)
def test_codes_give_what_they_stand_for_whichever_way_it_is_launched(rows: int, bits: tuple[int, ...]) -> None:
    weights, expert = made(rows, bits)
    actions = actions_of(expert, weights)
    assert benchmark.distance(actions, benchmark.reference(expert), expert.noise) < 2e-3
    assert torch.equal(actions_of(expert, weights, "phases"), actions)


def actions_of_grid(expert: Any, weights: ExpertWeights, rows: int, clusters: int) -> Tensor:
    """Of repeated calls of a grid of so many clusters, which must give equal bits."""
    kernel = ExpertKernel(weights, rows, STEPS, capacity=PREFIX[rows], clusters=clusters)
    assert kernel.clusters == clusters
    kernel.prepare(expert.modulation)
    valid = torch.tensor([PREFIX[rows]], dtype=torch.int32, device=DEVICE)
    actions, scratch = torch.full_like(expert.noise, float("nan")), ExpertScratch.allocate(rows, DEVICE)
    inputs = (expert.modulation, expert.rope, expert.key, expert.value, valid, expert.noise, actions, scratch)
    assert benchmark.equal_bits(lambda: kernel(*inputs), actions)
    return actions


@pytest.mark.parametrize("bits", [(16, 16, 16, 16), (8, 8, 8, 8), (4, 4, 4, 4)])
@pytest.mark.parametrize(("rows", "clusters"), [(10, 2), (10, 7), (10, 12), (1, 3), (16, 8)])
def test_few_rows_are_as_exact_in_a_smaller_grid(rows: int, clusters: int, bits: tuple[int, ...]) -> None:
    """Other bits: a cluster's share of `down` is of other hidden values then, and is rounded as a whole."""
    weights, expert = made(rows, bits)
    actions = actions_of_grid(expert, weights, rows, clusters)
    assert benchmark.distance(actions, benchmark.reference(expert), expert.noise) < 2e-3
    assert benchmark.distance(actions, actions_of(expert, weights), expert.noise) < 2e-3


@pytest.mark.parametrize("bits", [(8, 8, 8, 8), (4, 4, 4, 4)])
@pytest.mark.parametrize(("rows", "clusters"), [(50, 14), (30, 7)])
def test_many_rows_have_equal_bits_in_a_smaller_grid(rows: int, clusters: int, bits: tuple[int, ...]) -> None:
    weights, expert = made(rows, bits)
    assert torch.equal(actions_of_grid(expert, weights, rows, clusters), actions_of(expert, weights))


def subnormal(matrices: Tensor, bits: int) -> tuple[Codes, Tensor]:
    """Codes of which all values, or all scales, are subnormal or zero, with the spread of `matrices`."""
    layers, outputs, inputs = matrices.shape
    generator = torch.Generator(DEVICE).manual_seed(4)

    def codes(least: int, most: int, *shape: int) -> Tensor:
        return torch.randint(least, most, shape, generator=generator, device=DEVICE, dtype=torch.uint8)

    signs = codes(0, 2, layers, outputs, inputs)
    if bits == 8:
        made = codes(0, 8, layers, outputs, inputs) | signs << 7
        values, scales = e4m3.decode(made), None
    else:
        of_values = codes(0, 2, layers, outputs, inputs) | signs << 3
        made, scales = e2m1.pack(of_values), codes(0, 8, layers, outputs, inputs // 16)
        values = e2m1.decode(of_values) * e4m3.decode(scales).repeat_interleave(16, dim=-1)
    factor = (matrices.float().std() / values.std()).expand(layers, outputs).contiguous()
    return Codes(made, factor, scales), values * factor[..., None]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rows", [10, 50])
def test_subnormal_codes_and_scales_keep_their_values(rows: int, bits: int) -> None:
    drawn = benchmark.draw(rows, PREFIX[rows], DEVICE, LAYERS, STEPS)
    pairs = {name: subnormal(getattr(drawn, name), bits) for name in PRODUCTS}
    qkv, output, gate_up, down = (codes for codes, _ in pairs.values())
    weights = pack(qkv, output, gate_up, down, drawn.enter, drawn.leave, few_rows=rows <= FEW_ROWS)
    expert = replace(drawn, **{name: values for name, (_, values) in pairs.items()})
    truth = benchmark.reference(expert)
    assert benchmark.distance(actions_of(expert, weights), truth, expert.noise) < 2e-3
