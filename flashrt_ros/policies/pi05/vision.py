"""Vision encoder and projector: the pixels of every view to prefix rows."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ...ops import OpTable
from .config import Pi05Config
from .plan import image_buffer
from .weights import VisionLayer, VisionWeights


def encode_views(ops: OpTable, config: Pi05Config, weights: VisionWeights, arena: Mapping[str, Tensor]) -> None:
    """Write the first `image_rows` rows of `prefix_residual`; all views go through every product together."""
    _patches(ops, config, arena)
    residual, normed = arena["vision_residual"], arena["vision_normed"]
    ops.linear(arena["vision_patches"], weights.patch, residual=weights.position, out=residual)
    for layer in weights.layers:
        _layer(ops, config, layer, arena)
    ops.layer_norm(residual, weights.norm.weight, weights.norm.bias, eps=config.eps, out=normed)
    ops.linear(
        normed,
        weights.projector.weight,
        weights.projector.bias,
        out=arena["prefix_residual"][: config.image_rows],
    )


def _patches(ops: OpTable, config: Pi05Config, arena: Mapping[str, Tensor]) -> None:
    patches = arena["vision_patches"].view(len(config.views), config.patches, config.patch_values)
    for index, view in enumerate(config.views):
        ops.pixels_to_patches(
            arena[image_buffer(view)], arena["image_format"][index], patch=config.patch_size, out=patches[index]
        )


def _layer(ops: OpTable, config: Pi05Config, layer: VisionLayer, arena: Mapping[str, Tensor]) -> None:
    residual, normed = arena["vision_residual"], arena["vision_normed"]
    qkv, mixed, hidden = arena["vision_qkv"], arena["vision_attention"], arena["vision_hidden"]
    ops.layer_norm(residual, layer.norm1.weight, layer.norm1.bias, eps=config.eps, out=normed)
    ops.linear(normed, layer.qkv.weight, layer.qkv.bias, out=qkv)
    ops.image_attention(qkv, images=len(config.views), heads=config.vision_heads, out=mixed)
    ops.linear(mixed, layer.output.weight, layer.output.bias, residual=residual, out=residual)
    ops.layer_norm(residual, layer.norm2.weight, layer.norm2.bias, eps=config.eps, out=normed)
    ops.linear(normed, layer.up.weight, layer.up.bias, activation="gelu_tanh", out=hidden)
    ops.linear(hidden, layer.down.weight, layer.down.bias, residual=residual, out=residual)
