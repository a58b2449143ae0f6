"""Action expert: one Euler step of the chunk."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ...ops import OpTable
from .config import Pi05Config
from .weights import ExpertWeights, GemmaLayer

_GATE = 2  # row of a modulation, behind scale and shift


def denoise_step(
    ops: OpTable,
    config: Pi05Config,
    weights: ExpertWeights,
    arena: Mapping[str, Tensor],
    key_value: Tensor,
    modulation: Tensor,
) -> None:
    """Move `actions` one step along the flow, in place.

    Args:
        key_value: float[layers, 2, rows, key heads, head_dim], the prefix; the first `prefix_rows` rows are valid.
        modulation: float32[modulations, 3, width] of this step.
    """
    actions, residual, normed = arena["actions"], arena["expert_residual"], arena["expert_normed"]
    ops.linear(actions, weights.enter.weight, weights.enter.bias, out=residual)
    branch: Tensor | None = None
    gate: Tensor | None = None
    for index, layer in enumerate(weights.layers):
        sites = modulation[2 * index : 2 * index + 2]
        branch, gate = _layer(ops, config, layer, arena, key_value[index], sites, branch, gate)
    ops.gated_residual_ada_rms_norm(residual, branch, gate, modulation[-1], eps=config.eps, out=normed)
    ops.euler_update(actions, normed, weights.leave.weight, weights.leave.bias)


def _layer(
    ops: OpTable,
    config: Pi05Config,
    layer: GemmaLayer,
    arena: Mapping[str, Tensor],
    prefix: Tensor,
    sites: Tensor,
    branch: Tensor | None,
    gate: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run one layer; return what is still to be added to the residual, and its gate."""
    residual, normed, added = arena["expert_residual"], arena["expert_normed"], arena["expert_branch"]
    query = arena["expert_query"].view(-1, config.query_heads, config.head_dim)
    key = arena["expert_key"].view(-1, config.key_heads, config.head_dim)
    value = arena["expert_value"].view(key.shape)
    ops.gated_residual_ada_rms_norm(residual, branch, gate, sites[0], eps=config.eps, out=normed)
    ops.linear(normed, layer.qkv, out=arena["expert_qkv"])
    ops.split_rope_write(arena["expert_qkv"], arena["chunk_rope"], query=query, key=key, value=value)
    ops.chunk_attention(query, prefix[0], prefix[1], key, value, arena["prefix_rows"], out=arena["expert_attention"])
    ops.linear(arena["expert_attention"], layer.output, out=added)
    ops.gated_residual_ada_rms_norm(residual, added, sites[0][_GATE], sites[1], eps=config.eps, out=normed)
    ops.linear(normed, layer.gate_up, out=arena["expert_gate_up"])
    ops.geglu(arena["expert_gate_up"], out=arena["expert_hidden"])
    ops.linear(arena["expert_hidden"], layer.down, out=added)
    return added, sites[1][_GATE]
