"""Feed-forward blocks: gated (GeGLU, SwiGLU) with gate and up in one product, plain ones with GELU in the product."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import permutations
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops.cuda import rows
from ..patches import Call
from ..structure import ModuleStructure, Observation, Unsuitable
from .norms import dense_rows, needs_kernels

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "silu": F.silu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "gelu": F.gelu,
        "relu": F.relu,
    }
)


@dataclass(frozen=True)
class GatedMlp:
    """down(activation(gate(x)) * up(x))."""

    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear
    activation: str


class PackedGatedMlp(ModuleStructure[GatedMlp]):
    """Gate and up as one product, then activation and product, then down."""

    name = "packed_gated_mlp"
    kind = "packing"
    tolerance = 8.0  # three products, each of whose results is rounded

    def hypotheses(self, module: nn.Module) -> Iterable[GatedMlp]:
        """Modules of three linear layers, two alike and one back; either of the two may be the gate."""
        layers = [child for child in module.children() if isinstance(child, nn.Linear)]
        if len(layers) != 3 or any(True for child in module.children() if list(child.children())):
            return
        for gate, up, down in permutations(layers):
            shapes = gate.weight.shape == up.weight.shape == down.weight.T.shape
            if shapes and (gate.bias is None) == (up.bias is None):
                for activation in _ACTIVATIONS:
                    yield GatedMlp(gate, up, down, activation)

    def reference(self, facts: GatedMlp, x: Tensor) -> Tensor:
        """The definition above."""
        result: Tensor = facts.down(_ACTIVATIONS[facts.activation](facts.gate(x)) * facts.up(x))
        return result

    def kernel(self, facts: GatedMlp, observation: Observation) -> Call:
        """The packed weight is a copy: it costs the memory of gate and up once more."""
        weight, bias = packed((facts.gate, facts.up))
        down, activation = facts.down, _ACTIVATIONS[facts.activation]

        def mlp(x: Tensor) -> Tensor:
            gate, up = F.linear(x, weight, bias).chunk(2, dim=-1)
            return F.linear(activation(gate).mul_(up), down.weight, down.bias)

        return mlp


class GegluKernel(PackedGatedMlp):
    """The same with this project's GeGLU kernel between the products."""

    name = "geglu_kernel"
    kind = "kernel"

    def available(self, device: torch.device) -> str:
        """GPUs for which the kernels are built."""
        return needs_kernels(device)

    def kernel(self, facts: GatedMlp, observation: Observation) -> Call:
        """tanh-GELU in bfloat16, hidden width in multiples of 4096."""
        hidden, dtype = facts.gate.out_features, observation.args[0].dtype
        if facts.activation != "gelu_tanh" or dtype != torch.bfloat16 or hidden % 4096:
            raise Unsuitable(
                f"the block is {facts.activation}, {dtype}, {hidden} wide; the kernel takes gelu_tanh, bfloat16, "
                "multiples of 4096"
            )
        weight, bias = packed((facts.gate, facts.up))
        down = facts.down
        return lambda x: F.linear(row_geglu(F.linear(x, weight, bias)), down.weight, down.bias)


@torch.library.custom_op("flashrt_ros::row_geglu", mutates_args=())
def row_geglu(gate_up: Tensor) -> Tensor:
    """gelu_tanh(gate) * up of bf16[..., 2 * hidden]."""
    flat = dense_rows(gate_up)
    out = torch.empty(flat.shape[0], flat.shape[1] // 2, dtype=flat.dtype, device=flat.device)
    rows.geglu(flat, out=out)
    return out.view(*gate_up.shape[:-1], -1)


def packed(layers: Iterable[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weights, and biases where there are any, of several layers one above the other."""
    chosen = list(layers)
    weight = torch.cat([layer.weight.detach() for layer in chosen])
    biases = [layer.bias.detach() for layer in chosen if layer.bias is not None]
    return weight, torch.cat(biases) if biases else None


@dataclass(frozen=True)
class PlainMlp:
    """down(gelu(up(x)))."""

    up: nn.Linear
    down: nn.Linear
    approximate: str


class GeluEpilogue(ModuleStructure[PlainMlp]):
    """GELU (tanh) computed by the product in front of it, through cuBLASLt."""

    name = "gelu_epilogue"
    tolerance = 8.0

    def available(self, device: torch.device) -> str:
        """Only GPUs compute it within the product."""
        return "" if device.type == "cuda" else "needs a GPU"

    def hypotheses(self, module: nn.Module) -> Iterable[PlainMlp]:
        """Modules of two linear layers, up and back."""
        layers = [child for child in module.children() if isinstance(child, nn.Linear)]
        if len(layers) == 2 and layers[0].weight.shape == layers[1].weight.T.shape and layers[0].bias is not None:
            for approximate in ("tanh", "none"):
                yield PlainMlp(layers[0], layers[1], approximate)

    def reference(self, facts: PlainMlp, x: Tensor) -> Tensor:
        """The definition above."""
        result: Tensor = facts.down(F.gelu(facts.up(x), approximate=facts.approximate))
        return result

    def kernel(self, facts: PlainMlp, observation: Observation) -> Call:
        """`torch._addmm_activation`, which knows the tanh approximation only."""
        if facts.approximate != "tanh":
            raise Unsuitable("the block has the exact GELU; the product's epilogue knows the tanh approximation only")
        up, down = facts.up, facts.down

        def mlp(x: Tensor) -> Tensor:
            flat = x.reshape(-1, x.shape[-1])
            hidden: Any = torch._addmm_activation(up.bias, flat, up.weight.t(), use_gelu=True)
            return F.linear(hidden, down.weight, down.bias).view(x.shape)

        return mlp


STRUCTURES = (PackedGatedMlp(), GegluKernel(), GeluEpilogue())
