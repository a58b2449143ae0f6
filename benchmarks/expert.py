"""The action expert of π0.5 as one resident grid, at its true size with seeded weights: time, equal bits, distance.

Run: `python benchmarks/expert.py` on a GPU (writes benchmarks/results/h200_expert.json on an H200). `--rows N[,N]`
measures some chunk lengths only, `--formats N[,N]` some formats of the weights: 16 bits, 8 (E4M3) or 4 (NVFP4);
nothing is written then. `--show` prints the table of a result, without a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median_high
from typing import Any

import torch
import torch.nn.functional as F
from _common import RESULTS, write_result
from _gpu import device_us, digests, distance, gpu, graph_of, result_name
from torch import Tensor

from flashrt_ros.measure.circumstances import significant
from flashrt_ros.measure.tables import table
from flashrt_ros.ops.cuda.errors import KernelError
from flashrt_ros.ops.cuda.expert import ExpertKernel, ExpertScratch
from flashrt_ros.ops.cuda.expert_codes import Codes
from flashrt_ros.ops.cuda.expert_packing import (
    ACTIONS,
    FEW_ROWS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INNER,
    WIDTH,
    ExpertWeights,
    pack,
)
from flashrt_ros.precision import e4m3, nvfp4

PREFIXES = {10: 712, 50: 968}  # chunk length → prefix rows of two and of three views with 200 tokens
LAYERS, STEPS = 18, 10
COMPARED, TIMED = 30, 40
ONE, PHASES = "one", "phases"
FORMATS = (16, 8, 4)  # bits of the weights: bfloat16, E4M3 with a scale for each output, NVFP4
_EPS, _THETA = 1e-6, 10000.0
_MATRICES = ("qkv", "output", "gate_up", "down")

PROTOCOL = (
    f"{LAYERS} layers, {STEPS} Euler steps, weights, prefix and noise drawn from a seed. p50_ms, min_ms: {TIMED} calls "
    "between device events, each finished before the next begins. launches: one for everything, or one for each phase, "
    f"in a CUDA graph, so that no host time is in it. equal_bits: all of {COMPARED} calls gave the bits of the first; "
    "as_one: phases gave the bits of the one launch. distance: of the flow (actions minus noise) from float32 PyTorch "
    "with TF32 off and the same weights, relative: bfloat16 (bits 16), or what codes of E4M3 with a scale for each "
    "output (8) or of NVFP4 (4) stand for."
)


@dataclass(frozen=True)
class Expert:
    """Everything that the actions depend on.

    Args:
        qkv, output, gate_up, down: bf16[layers, outputs, inputs], or float32 that codes stand for.
        enter, leave: float32 weight [outputs, inputs] and bias of both ends.
        modulation: float32[steps, 2 * layers + 1, 3, width]: scale, shift, gate.
        rope: bf16[rows, head_dim], cosines, then sines.
        key, value: bf16[layers, prefix, head_dim].
        noise: float32[rows, actions].
    """

    qkv: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor
    enter: tuple[Tensor, Tensor]
    leave: tuple[Tensor, Tensor]
    modulation: Tensor
    rope: Tensor
    key: Tensor
    value: Tensor
    noise: Tensor

    def packed(self, bits: int = 16) -> tuple[ExpertWeights, Expert]:
        """The weights as the kernel reads them, and the expert whose weights are what those stand for."""
        matrices = {name: getattr(self, name) for name in _MATRICES}
        few_rows = len(self.noise) <= FEW_ROWS
        if bits == 16:
            return pack(**matrices, enter=self.enter, leave=self.leave, few_rows=few_rows), self
        made = {name: quantised(matrix, bits) for name, matrix in matrices.items()}
        codes, values = ({name: pair[i] for name, pair in made.items()} for i in range(2))
        return pack(**codes, enter=self.enter, leave=self.leave, few_rows=few_rows), replace(self, **values)


def quantised(matrices: Tensor, bits: int) -> tuple[Codes, Tensor]:
    """Codes of float[layers, outputs, inputs], and float32 that they stand for."""
    outputs = matrices.shape[1]
    if bits == 8:
        pairs = [e4m3.quantise_weight(matrix, by_channel=True) for matrix in matrices]
        codes, scales = (torch.stack(parts) for parts in zip(*pairs, strict=True))
        return Codes(codes, scales), e4m3.decode(codes) * scales[..., None]
    made = [nvfp4.quantise_weight(matrix) for matrix in matrices]
    factor = torch.stack([each.tensor_scale.expand(outputs) for each in made])
    stored = Codes(torch.stack([each.packed for each in made]), factor, torch.stack([each.scales for each in made]))
    return stored, torch.stack([each.decode() for each in made])


def draw(rows: int, prefix: int, device: torch.device, layers: int = LAYERS, steps: int = STEPS) -> Expert:
    """An expert at the true widths; scales keep a deep network steady, so that no part of it is without effect."""
    generator = torch.Generator(device).manual_seed(1)

    def wide(*shape: int, scale: float) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator) * scale

    def half(*shape: int, scale: float = 1.0) -> Tensor:
        return wide(*shape, scale=scale).bfloat16()

    into = (2 * LAYERS) ** -0.5  # of a projection into the residual, beside 1 / √inputs
    qkv = half(layers, INNER + 2 * HEAD_DIM, WIDTH, scale=1 / 32)
    output = half(layers, WIDTH, INNER, scale=into / 45)
    gate_up = half(layers, 2 * HIDDEN, WIDTH, scale=1 / 32)
    down = half(layers, WIDTH, HIDDEN, scale=into / 64)
    enter = (half(WIDTH, ACTIONS, scale=0.18).float(), half(WIDTH, scale=0.02).float())
    leave = (half(ACTIONS, WIDTH, scale=0.003).float(), half(ACTIONS, scale=0.002).float())
    modulation = wide(steps, 2 * layers + 1, 3, WIDTH, scale=0.3)
    modulation[:, :, 2] += 1  # gates
    positions = torch.arange(rows, device=device)[:, None] + prefix
    angles = positions * _THETA ** (-torch.arange(HEAD_DIM // 2, device=device) / (HEAD_DIM // 2))
    rope = torch.cat((angles.cos(), angles.sin()), dim=1).bfloat16()
    key, value = half(2, layers, prefix, HEAD_DIM)
    noise = wide(rows, ACTIONS, scale=1.0)
    return Expert(qkv, output, gate_up, down, enter, leave, modulation, rope, key, value, noise)


def reference(expert: Expert) -> Tensor:
    """float32[rows, actions] by plain PyTorch in float32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    layers = [_float_layer(expert, index) for index in range(len(expert.qkv))]
    actions = expert.noise.clone()
    for modulation in expert.modulation:
        x = F.linear(actions, *expert.enter)
        for index, layer in enumerate(layers):
            x = x + modulation[2 * index, 2] * layer.attention(_normed(x, modulation[2 * index]))
            x = x + modulation[2 * index + 1, 2] * layer.feed_forward(_normed(x, modulation[2 * index + 1]))
        actions = actions + F.linear(_normed(x, modulation[-1]), *expert.leave)
    return actions


def _normed(x: Tensor, modulation: Tensor) -> Tensor:
    """RMS norm of float32[rows, width] with scale and shift."""
    inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + _EPS)
    return x * inverse * (1 + modulation[0]) + modulation[1]


@dataclass(frozen=True)
class FloatLayer:
    """One layer in float32: weights [outputs, inputs], prefix [prefix, head_dim], cosines and sines [rows, half]."""

    qkv: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor
    key: Tensor
    value: Tensor
    cosines: Tensor
    sines: Tensor

    def attention(self, x: Tensor) -> Tensor:
        """Of the chunk to prefix and chunk, projected; float32[rows, width] to the same."""
        query, key, value = torch.split(F.linear(x, self.qkv), [INNER, HEAD_DIM, HEAD_DIM], dim=-1)
        heads = self._rotated(query.view(len(x), HEADS, HEAD_DIM).transpose(0, 1))
        keys, values = torch.cat((self.key, self._rotated(key))), torch.cat((self.value, value))
        weights = torch.softmax(heads @ keys.t() * HEAD_DIM**-0.5, dim=-1)
        return F.linear((weights @ values).transpose(0, 1).flatten(1), self.output)

    def feed_forward(self, x: Tensor) -> Tensor:
        """GeGLU between two products; float32[rows, width] to the same."""
        gate, up = F.linear(x, self.gate_up).chunk(2, dim=-1)
        return F.linear(F.gelu(gate, approximate="tanh") * up, self.down)

    def _rotated(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        turned = (first * self.cosines - second * self.sines, second * self.cosines + first * self.sines)
        return torch.cat(turned, dim=-1)


def _float_layer(expert: Expert, index: int) -> FloatLayer:
    stacks = (expert.qkv, expert.output, expert.gate_up, expert.down, expert.key, expert.value)
    return FloatLayer(*(stack[index].float() for stack in stacks), *expert.rope.float().chunk(2, dim=1))


def call_of(expert: Expert, weights: ExpertWeights, launches: str) -> tuple[Callable[[], object], Tensor]:
    """A call that computes the actions, and the tensor that it writes them to."""
    rows, prefix, device = len(expert.noise), expert.key.shape[1], expert.noise.device
    kernel = ExpertKernel(weights, rows, len(expert.modulation), capacity=prefix, persistent=launches == ONE)
    kernel.prepare(expert.modulation)
    scratch = ExpertScratch.allocate(rows, device)
    valid = torch.tensor([prefix], dtype=torch.int32, device=device)
    actions = torch.full_like(expert.noise, float("nan"))
    inputs = (expert.modulation, expert.rope, expert.key, expert.value, valid, expert.noise, actions, scratch)

    def body(_: int = 0) -> None:
        kernel(*inputs)

    return (body if launches == ONE else graph_of(body, 1)), actions


def measure(rows: int, prefix: int, device: torch.device, bits: int = 16) -> Iterator[dict[str, Any]]:
    """One launch, then phase by phase, with weights of so many bits."""
    weights, expert = draw(rows, prefix, device).packed(bits)
    truth = reference(expert)
    one: Tensor | None = None
    for launches in (ONE, PHASES):
        call, actions = call_of(expert, weights, launches)
        equal = equal_bits(call, actions)
        times = device_us(call, TIMED)
        found = {
            "rows": rows,
            "prefix": prefix,
            "bits": bits,
            "launches": launches,
            "p50_ms": significant(median_high(times) / 1e3),
            "min_ms": significant(min(times) / 1e3),
            "distance": significant(distance(actions, truth, expert.noise), 3),
            "equal_bits": equal,
        }
        yield found if one is None else {**found, "as_one": torch.equal(actions, one)}
        one = actions


def equal_bits(call: Callable[[], object], actions: Tensor) -> bool:
    """Whether repeated calls write the bits of the first one to `actions`, which is poisoned in between."""
    call()
    first = actions.clone()
    for _ in range(COMPARED):
        actions.fill_(float("nan"))
        call()
        if not torch.equal(actions, first):
            return False
    return True


def shown(result: Mapping[str, Any]) -> str:
    """A result as a table."""
    header = ("rows", "prefix", "bits", "launches", "p50 ms", "min ms", "distance", "equal bits", "as one")
    keys = ("rows", "prefix", "bits", "launches", "p50_ms", "min_ms", "distance", "equal_bits", "as_one")
    return table(header, [[{"bits": 16, **case}.get(key) for key in keys] for case in result["cases"]])


def chosen(asked: str, known: Collection[int], what: str) -> list[int]:
    """Numbers of a list with commas, all of `known` if it is empty; ValueError for one that is not known."""
    for name in asked.split(",") if asked else ():
        if name not in map(str, known):
            raise ValueError(f"{what} '{name}'; there are: {', '.join(map(str, known))}")
    return [int(name) for name in asked.split(",")] if asked else list(known)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every case and write the result, or only show one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="chunk lengths with commas between; nothing is written then")
    parser.add_argument(
        "--formats", default="", help="bits of the weights with commas between: 16, 8, 4; nothing is written then"
    )
    parser.add_argument(
        "--show", type=Path, nargs="?", const=RESULTS / "h200_expert.json", help="print a result (default: the H200's)"
    )
    args = parser.parse_args(arguments)
    try:
        lengths = chosen(args.rows, PREFIXES, "no prefix is known for rows")
        formats = chosen(args.formats, FORMATS, "no format of weights has bits")
    except ValueError as error:
        parser.error(str(error))
    if args.show is not None:
        print(shown(json.loads(args.show.read_text())))
        return
    device = gpu("expert")
    name = torch.cuda.get_device_name(device)
    try:
        cases = [case for rows in lengths for bits in formats for case in measure(rows, PREFIXES[rows], device, bits)]
    except KernelError as error:
        sys.exit(f"expert: {str(error).splitlines()[0]}")
    result = {"device": name, "layers": LAYERS, "steps": STEPS, "sources": digests("expert"), "cases": cases}
    if not args.rows and not args.formats:
        write_result(result_name("expert", name), result, PROTOCOL)
    print(shown(result))
    if not all(case["equal_bits"] and case.get("as_one", True) for case in cases):
        sys.exit("expert: repeated launches did not give equal bits")


if __name__ == "__main__":
    main()
