"""Linear layers in FP8 (E4M3) with scales by row, where the GPU multiplies FP8."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..patches import Call
from ..structure import ModuleStructure, Observation, Unsuitable

_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_SMALLEST_CAPABILITY = (8, 9)
_FEWEST_WEIGHTS = 1 << 20  # a smaller layer is read faster than its input is quantised


class Fp8Linear(ModuleStructure[nn.Linear]):
    """x and weight are quantised row by row, x on the fly; products accumulate in float32.

    Costs 3 % of accuracy in each layer, so that the parity gate lets it through in few models; that is its job.
    """

    name = "fp8_linear"
    kind = "precision"

    def available(self, device: torch.device) -> str:
        """GPUs of compute capability 8.9 and above."""
        if device.type != "cuda":
            return "needs a GPU"
        found = torch.cuda.get_device_capability(device)
        return "" if found >= _SMALLEST_CAPABILITY else "this GPU has no FP8 product ({}.{})".format(*found)

    def hypotheses(self, module: nn.Module) -> Iterable[nn.Linear]:
        """`nn.Linear` of at least a million weights in bfloat16."""
        bfloat16 = type(module) is nn.Linear and module.weight.dtype == torch.bfloat16
        if isinstance(module, nn.Linear) and bfloat16 and module.weight.numel() >= _FEWEST_WEIGHTS:
            yield module

    def reference(self, facts: nn.Linear, x: Tensor) -> Tensor:
        """The layer itself."""
        return F.linear(x, facts.weight, facts.bias)

    def kernel(self, facts: nn.Linear, observation: Observation) -> Call:
        """`torch._scaled_mm`, with both widths in multiples of 16."""
        if facts.in_features % 16 or facts.out_features % 16:
            raise Unsuitable(f"the layer is {list(facts.weight.shape)}; FP8 products take multiples of 16")
        weight, scale = quantised(facts.weight.detach())
        bias = facts.bias

        def linear(x: Tensor) -> Tensor:
            values, scales = quantised(x.reshape(-1, x.shape[-1]))
            result = torch._scaled_mm(
                values, weight.t(), scale_a=scales, scale_b=scale.t(), bias=bias, out_dtype=torch.bfloat16
            )
            return result.view(*x.shape[:-1], -1)

        return linear


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 values of float[rows, width], and float32[rows, 1] scales: x is about values * scales."""
    scales = (x.abs().amax(-1, keepdim=True).float() / _LARGEST).clamp_min(1e-12)
    return (x.float() / scales).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn), scales


STRUCTURES = (Fp8Linear(),)
