"""benchmarks/expert.py, as far as it goes without a GPU, and short on one."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashrt_ros.ops.attention import chunk_attention
from flashrt_ros.ops.linear import geglu, linear
from flashrt_ros.ops.norms import gated_residual_ada_rms_norm
from flashrt_ros.ops.rope import split_rope_write
from test.benchmarks.scripts import RESULTS, module, run

expert = module("expert")
CPU = torch.device("cpu")
ROWS, PREFIX, LAYERS, STEPS = 3, 16, 2, 2


@pytest.fixture(scope="module")
def drawn() -> Any:
    return expert.draw(ROWS, PREFIX, CPU, LAYERS, STEPS)


def by_reference_ops(drawn: Any) -> Tensor:
    """The actions by the package's own definitions, all in float32."""
    valid = torch.tensor([PREFIX], dtype=torch.int32)
    heads, dim = expert.HEADS, expert.HEAD_DIM
    noise: Tensor = drawn.noise
    actions, rope = noise.clone(), drawn.rope.float()
    query, key, value = (torch.empty(ROWS, count, dim) for count in (heads, 1, 1))
    normed, attended = torch.empty(ROWS, expert.WIDTH), torch.empty(ROWS, heads * dim)
    hidden, branch = torch.empty(ROWS, expert.HIDDEN), torch.empty(ROWS, expert.WIDTH)
    for modulation in drawn.modulation:
        residual, last = torch.empty(ROWS, expert.WIDTH), None
        linear(actions, *drawn.enter, out=residual)
        for layer in range(LAYERS):
            now = modulation[2 * layer]
            gated_residual_ada_rms_norm(residual, None if last is None else branch, last, now, eps=1e-6, out=normed)
            split_rope_write(normed @ drawn.qkv[layer].float().t(), rope, query=query, key=key, value=value)
            past = (drawn.key[layer].float()[:, None], drawn.value[layer].float()[:, None])
            chunk_attention(query, *past, key, value, valid, out=attended)
            linear(attended, drawn.output[layer].float(), out=branch)
            gated_residual_ada_rms_norm(residual, branch, now[2], modulation[2 * layer + 1], eps=1e-6, out=normed)
            geglu(normed @ drawn.gate_up[layer].float().t(), out=hidden)
            linear(hidden, drawn.down[layer].float(), out=branch)
            last = modulation[2 * layer + 1, 2]
        gated_residual_ada_rms_norm(residual, branch, last, modulation[-1], eps=1e-6, out=normed)
        linear(normed, *drawn.leave, residual=actions.clone(), out=actions)
    return actions


def test_its_reference_agrees_with_the_packages_own(drawn: Any) -> None:
    flow, expected = (actions - drawn.noise for actions in (expert.reference(drawn), by_reference_ops(drawn)))
    assert (flow - expected).norm() < 1e-4 * expected.norm()
    assert flow.norm() > 0.01 * drawn.noise.norm()


@pytest.mark.parametrize("name", ["qkv", "output", "gate_up", "down", "modulation", "rope", "key", "value"])
def test_no_operand_is_without_effect(drawn: Any, name: str) -> None:
    assert name in {field.name for field in fields(drawn)}
    flow = expert.reference(drawn) - drawn.noise
    other = expert.reference(replace(drawn, **{name: getattr(drawn, name).flip(-1)})) - drawn.noise
    assert (other - flow).norm() > 1e-3 * flow.norm()


def test_equal_seeds_draw_equal_experts(drawn: Any) -> None:
    again = expert.draw(ROWS, PREFIX, CPU, LAYERS, STEPS)
    assert torch.equal(again.down, drawn.down)
    assert torch.equal(again.noise, drawn.noise)


def test_a_result_that_changes_once_is_noticed() -> None:
    actions, calls = torch.zeros(3, 2), iter(range(100))

    def steady() -> None:
        actions.copy_(torch.ones(3, 2))

    def unsteady() -> None:
        actions.copy_(torch.full((3, 2), 2.0 if next(calls) == expert.COMPARED else 1.0))

    assert expert.equal_bits(steady, actions)
    assert not expert.equal_bits(unsteady, actions)


def test_a_call_that_writes_only_a_part_is_noticed() -> None:
    actions = torch.ones(3, 2)
    assert not expert.equal_bits(lambda: actions[1:].fill_(1.0), actions)


def test_rows_without_a_known_prefix_are_refused() -> None:
    found = run("expert", "--rows", "10,11")
    assert found.returncode == 2
    assert "no prefix is known for rows '11'; there are: 10, 50" in found.stderr


def test_formats_that_do_not_exist_are_refused() -> None:
    found = run("expert", "--formats", "8,6")
    assert found.returncode == 2
    assert "no format of weights has bits '6'; there are: 16, 8, 4" in found.stderr


@pytest.mark.parametrize("bits", [8, 4])
def test_narrow_weights_are_packed_from_what_the_reference_gets(drawn: Any, bits: int) -> None:
    weights, narrow = drawn.packed(bits)
    assert weights.bits == (bits,) * 4
    for stream, name in ((weights.output, "output"), (weights.down, "down")):
        torch.testing.assert_close(stream.matrix(1), getattr(narrow, name)[1], rtol=1e-6, atol=0.0)
        off = (getattr(narrow, name) - getattr(drawn, name).float()).norm() / getattr(drawn, name).float().norm()
        assert 0.001 < off < (0.04 if bits == 8 else 0.15)


def test_the_committed_result_is_shown() -> None:
    found = run("expert", "--show")
    assert found.returncode == 0, found.stderr
    cases = json.loads((RESULTS / "h200_expert.json").read_text())["cases"]
    lines = [line.split() for line in found.stdout.splitlines()[2:]]
    assert len(lines) == len(cases)
    for line, case in zip(lines, cases, strict=True):
        assert line[:4] == [str(case["rows"]), str(case["prefix"]), str(case.get("bits", 16)), case["launches"]]
        assert float(line[4]) == pytest.approx(case["p50_ms"], rel=1e-3)
        assert line[7] == str(case["equal_bits"]) == "True"


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="needs a GPU of compute capability 9.0",
)
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_both_ways_to_launch_are_measured(bits: int) -> None:
    cases = list(expert.measure(10, 712, torch.device("cuda", 0), bits))
    assert [case["launches"] for case in cases] == [expert.ONE, expert.PHASES]
    assert all(case["equal_bits"] and 0 < case["min_ms"] <= case["p50_ms"] for case in cases)
    assert cases[1]["as_one"] is True
    assert all(case["distance"] < 2e-3 for case in cases)
