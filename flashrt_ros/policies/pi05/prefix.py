"""Prefix encoder: image rows and prompt rows to the keys and values of every layer."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ...ops import OpTable
from ...precision.packed import PackedWeight
from .config import Pi05Config
from .weights import GemmaLayer, PrefixWeights


def encode_prefix(
    ops: OpTable, config: Pi05Config, weights: PrefixWeights, arena: Mapping[str, Tensor], rows: int
) -> None:
    """Write the first `rows` rows of `key_value`, of which the first `prefix_rows` are valid.

    The image rows are in `prefix_residual` already. The last layer is followed up to its keys and values only.
    """
    live = {name: tensor[:rows] for name, tensor in arena.items() if name.startswith("prefix_") and tensor.ndim > 1}
    live |= {"rope": arena["rope"][:rows], "valid": arena["prefix_rows"]}
    residual = live["prefix_residual"]
    residual[config.image_rows :].copy_(arena["prompt_embedding"][: rows - config.image_rows])
    key_value = arena["key_value"][:, :, :rows].view(config.layers, 2, rows, config.key_heads, config.head_dim)
    branch: Tensor | None = None
    for layer, (key, value) in zip(weights.layers, key_value, strict=False):
        branch = _layer(ops, config, layer, live, branch, key, value)
    ops.residual_rms_norm(residual, branch, eps=config.eps, out=live["prefix_normed"])
    last = arena["prefix_qkv"].flatten()[: rows * 2 * config.key_width].view(rows, -1)
    key, value = key_value[-1]
    ops.linear(live["prefix_normed"], weights.last_key_value, out=last)
    ops.split_rope_write(last, live["rope"], query=None, key=key, value=value)


def _scales(layer: GemmaLayer) -> dict[str, Tensor]:
    """Scales of queries, keys and values, where attention multiplies their codes: then ops are those of a tier."""
    scales = layer.qkv.output_scales if isinstance(layer.qkv, PackedWeight) else None
    return {} if scales is None else {"scales": scales}


def _layer(
    ops: OpTable,
    config: Pi05Config,
    layer: GemmaLayer,
    live: Mapping[str, Tensor],
    branch: Tensor | None,
    key: Tensor,
    value: Tensor,
) -> Tensor:
    """Run one layer and return what is still to be added to the residual."""
    residual, normed, added = live["prefix_residual"], live["prefix_normed"], live["prefix_branch"]
    query = live["prefix_query"].view(-1, config.query_heads, config.head_dim)
    mixed = live["prefix_attention"]
    ops.residual_rms_norm(residual, branch, eps=config.eps, out=normed)
    ops.linear(normed, layer.qkv, out=live["prefix_qkv"])
    ops.split_rope_write(live["prefix_qkv"], live["rope"], query=query, key=key, value=value)
    ops.prefix_attention(query, key, value, live["valid"], out=mixed, **_scales(layer))
    ops.linear(mixed, layer.output, out=added)
    ops.residual_rms_norm(residual, added, eps=config.eps, out=normed)
    ops.linear(normed, layer.gate_up, out=live["prefix_gate_up"])
    ops.geglu(live["prefix_gate_up"], out=live["prefix_hidden"])
    ops.linear(live["prefix_hidden"], layer.down, out=added)
    return added
