"""Normalisations over the last axis, whatever their class is called: one kernel instead of five to ten."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops.cuda import rows
from ...ops.cuda.boundary import made_dense
from ..patches import Call
from ..structure import ModuleStructure, Observation, Unsuitable

_EPS = ("eps", "variance_epsilon", "epsilon", "layer_norm_eps")  # attributes in which classes keep it
_SMALLEST_CAPABILITY = (9, 0)


@dataclass(frozen=True)
class Norm:
    """What a normalising module computes.

    Attributes:
        centred: LayerNorm (the mean is subtracted) or RMSNorm.
        weight, bias: float[width] or None.
        offset: the factor is offset + weight: 0, or 1 as in Gemma.
        eps: added to the mean square.
        late: the weight multiplies after the result was rounded to the input's dtype, as in Llama.
    """

    centred: bool
    weight: Tensor | None
    bias: Tensor | None
    offset: float
    eps: float
    late: bool = False

    def factor(self) -> Tensor | None:
        """float32[width]: offset + weight."""
        return None if self.weight is None else self.offset + self.weight.detach().float()


def norm_reference(facts: Norm, x: Tensor) -> Tensor:
    """Normalise over the last axis, in float32; the result has the type that x and weight promote to, or x's own."""
    wide = x.float()
    if facts.centred:
        wide = wide - wide.mean(-1, keepdim=True)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + facts.eps)
    factor = facts.factor()
    if factor is not None and facts.late:
        assert facts.weight is not None
        return facts.weight * normed.to(x.dtype)
    normed = normed if factor is None else normed * factor
    return (normed if facts.bias is None else normed + facts.bias.float()).to(x.dtype)


class NormStructure(ModuleStructure[Norm]):
    """RMSNorm (factor w or 1 + w) and LayerNorm as torch's own fused functions."""

    name = "fused_norm"

    def hypotheses(self, module: nn.Module) -> Iterable[Norm]:
        """Leaf modules with one vector, or two, or none, and a small constant."""
        if isinstance(module, nn.LayerNorm) or next(module.children(), None) is not None:
            return  # torch's own is what the kernel would be
        own = dict(module.named_parameters(recurse=False))
        eps = _eps(module)
        if eps is None or len(own) > 2 or any(p.ndim != 1 or not p.is_floating_point() for p in own.values()):
            return
        bias = own.pop("bias", None)
        weight = next(iter(own.values()), None)
        if len(own) < 2:
            yield from _norms(weight, bias, eps)

    def reference(self, facts: Norm, *args: Any, **kwargs: Any) -> Tensor:
        """See `norm_reference`."""
        return norm_reference(facts, *args, **kwargs)

    def kernel(self, facts: Norm, observation: Observation) -> Call:
        """`torch.rms_norm` or `torch.layer_norm`, in the input's dtype."""
        dtype = observation.args[0].dtype
        width = (observation.args[0].shape[-1],)
        factor = facts.factor()
        weight = None if factor is None else factor.to(dtype)
        bias = None if facts.bias is None else facts.bias.detach().to(dtype)

        def normed(x: Tensor) -> Tensor:
            if facts.centred:
                return F.layer_norm(x, width, weight, bias, facts.eps)
            y = F.rms_norm(x, width, weight, facts.eps)
            return y if bias is None else y + bias

        return normed


def _norms(weight: Tensor | None, bias: Tensor | None, eps: float) -> Iterator[Norm]:
    for centred in (False, True):
        yield Norm(centred, weight, bias, 0.0, eps)
        if weight is not None:
            yield Norm(centred, weight, bias, 1.0, eps)
            if bias is None:
                yield Norm(centred, weight, None, 0.0, eps, late=True)


def _eps(module: nn.Module) -> float | None:
    values = (getattr(module, name, None) for name in _EPS)
    return next((float(value) for value in values if isinstance(value, float) and 0 <= value < 0.1), None)


class RowKernelNorm(NormStructure):
    """The same modules, and `nn.LayerNorm`, on this project's row kernels: bfloat16, one warp a row."""

    name = "row_norm"

    def available(self, device: torch.device) -> str:
        """GPUs for which the kernels are built."""
        return needs_kernels(device)

    def hypotheses(self, module: nn.Module) -> Iterable[Norm]:
        """Those of `fused_norm`, and `nn.LayerNorm` over one axis."""
        if isinstance(module, nn.LayerNorm) and len(module.normalized_shape) == 1:
            yield Norm(True, module.weight, module.bias, 0.0, module.eps)
        else:
            yield from super().hypotheses(module)

    def kernel(self, facts: Norm, observation: Observation) -> Call:
        """`layer_norm` and `gated_residual_ada_rms_norm` of `ops.cuda.rows`; the latter with scale = factor - 1."""
        x = observation.args[0]
        width = x.shape[-1]
        if x.dtype != torch.bfloat16 or width % 128:
            raise Unsuitable(f"rows are {x.dtype} of {width}; the kernel takes bfloat16 in multiples of 128")
        factor = facts.factor()
        factor = torch.ones(width, device=x.device) if factor is None else factor
        shift = torch.zeros(width, device=x.device) if facts.bias is None else facts.bias.detach().float()
        if facts.centred:
            weight, bias = factor.bfloat16(), shift.bfloat16()
            return lambda x: row_layer_norm(x, weight, bias, facts.eps)
        modulation = torch.stack((factor - 1, shift, torch.zeros_like(shift)))
        return lambda x: row_rms_norm(x, modulation, facts.eps)


def needs_kernels(device: torch.device) -> str:
    """Why this project's CUDA kernels cannot run on `device`; empty if they can."""
    if device.type != "cuda":
        return "needs a GPU"
    found = torch.cuda.get_device_capability(device)
    if found < _SMALLEST_CAPABILITY:
        return "needs compute capability {}.{}, this GPU has {}.{}".format(*_SMALLEST_CAPABILITY, *found)
    return ""


# Operations of torch, so that whoever watches operations (autograd, graphs) sees that results depend on arguments.


@torch.library.custom_op("flashrt_ros::row_layer_norm", mutates_args=())
def row_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm of bf16[..., width]; weight and bias bf16[width]."""
    flat = dense_rows(x)
    out = torch.empty_like(flat)
    rows.layer_norm(flat, weight, bias, eps=eps, out=out)
    return out.view(x.shape)


@torch.library.custom_op("flashrt_ros::row_rms_norm", mutates_args=())
def row_rms_norm(x: Tensor, modulation: Tensor, eps: float) -> Tensor:
    """x / rms(x) * (1 + scale) + shift of bf16[..., width]; modulation float32[3, width] = scale, shift, unused."""
    flat = dense_rows(x)
    out = torch.empty_like(flat)
    rows.gated_residual_ada_rms_norm(flat, None, None, modulation, eps=eps, out=out)
    return out.view(x.shape)


def dense_rows(x: Tensor) -> Tensor:
    """`x` as [rows, width], one behind the other in memory, where the kernels read them; a copy if they were not.

    A vision tower whose patch embedding is transposed has no dense rows in any layer, as sums keep the strides of
    their first term. torch's own norms copy such rows too, so this costs nothing that the original does not pay.
    """
    return made_dense(x.reshape(-1, x.shape[-1]))


@dataclass(frozen=True)
class GatedNorm:
    """An RMSNorm that also returns a gate. Scale, shift and gate come from a condition through one dense layer.

    Without the dense layer there is a weight, the factor is 1 + weight, and the gate is None.
    """

    dense: nn.Linear | None
    weight: Tensor | None
    eps: float


class GatedRowNorm(ModuleStructure[GatedNorm]):
    """(x, cond) → (x / rms(x) · (1 + scale) + shift, gate), as π0 and π0.5 have it, for one batch row."""

    name = "gated_row_norm"

    def available(self, device: torch.device) -> str:
        """GPUs for which the kernels are built."""
        return needs_kernels(device)

    def hypotheses(self, module: nn.Module) -> Iterable[GatedNorm]:
        """Modules with one vector, or with one linear layer of three times as many outputs as the row is wide."""
        children, own = list(module.children()), list(module.parameters(recurse=False))
        eps = _eps(module)
        if eps is None:
            return
        if not children and len(own) == 1 and own[0].ndim == 1:
            yield GatedNorm(None, own[0], eps)
        elif len(children) == 1 and not own and isinstance(children[0], nn.Linear):
            yield from [GatedNorm(children[0], None, eps)] * (children[0].out_features % 3 == 0)

    def reference(self, facts: GatedNorm, x: Tensor, cond: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """x / rms(x) * (1 + scale) + shift, and the gate, which is for whoever adds the branch."""
        normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + facts.eps)
        if facts.dense is None:
            assert facts.weight is not None
            return (normed * (1 + facts.weight.float())).to(x.dtype), None
        if cond is None:
            raise ValueError("an adaptive norm needs its condition")
        scale, shift, gate = facts.dense(cond).unsqueeze(1).chunk(3, dim=-1)
        return (normed * (1 + scale.float()) + shift.float()).to(x.dtype), gate.to(x.dtype)

    def kernel(self, facts: GatedNorm, observation: Observation) -> Call:
        """`gated_residual_ada_rms_norm` without a branch."""
        x = observation.args[0]
        if x.dtype != torch.bfloat16 or x.shape[-1] % 128 or x.ndim != 3 or x.shape[0] != 1:
            raise Unsuitable(f"rows are {x.dtype}{list(x.shape)}; the kernel takes bfloat16[1, rows, multiple of 128]")
        dense, eps = facts.dense, facts.eps
        if dense is not None:

            def normed(x: Tensor, cond: Tensor) -> tuple[Tensor, Tensor]:
                modulation = dense(cond).view(3, -1)
                return row_rms_norm(x, modulation.float(), eps), modulation[2].to(x.dtype).view(1, 1, -1)

            return normed
        assert facts.weight is not None
        scale = facts.weight.detach().float()
        fixed = torch.stack((scale, torch.zeros_like(scale), torch.zeros_like(scale)))
        return lambda x, cond=None: (row_rms_norm(x, fixed, eps), None)


STRUCTURES = (NormStructure(), RowKernelNorm(), GatedRowNorm())
