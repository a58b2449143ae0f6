"""The sites of π0.5 by name: its matrix products, its embedding table, and what the prefix's attention multiplies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from torch import Tensor

from .config import Pi05Config
from .weights import Dense, GemmaLayer, Pi05Weights, VisionLayer

EMBEDDING_SITE = "prefix.embedding"
Operands = tuple[str, str, str]
Change = Callable[[str, Tensor], Tensor]
_Layer = TypeVar("_Layer", VisionLayer, GemmaLayer)


def site_names(config: Pi05Config) -> tuple[str, ...]:
    """Every site, in the order of the computation.

    `vision.{qkv,output,up,down}.<layer>`, `prefix.embedding`, `prefix.{qkv,output,gate_up,down}.<layer>`,
    `prefix.attention.{query,key,value}.<layer>` and `expert.{qkv,output,gate_up,down}.<layer>`. Of the last prefix
    layer only keys and values are read: its `qkv` holds these rows alone, and it has no other site. What is no site
    stays 16-bit: patches, positions, projector, norms, the other attentions, the two ends of the expert, and the time
    layers, which run once a checkpoint.
    """
    last = config.layers - 1
    gemma = ("qkv", "output", "gate_up", "down")

    def prefix(layer: int) -> tuple[str, ...]:
        qkv, *behind = (f"prefix.{part}.{layer}" for part in gemma)
        return qkv, *operands_of(layer), *behind

    return (
        *(f"vision.{part}.{i}" for i in range(config.vision_layers) for part in ("qkv", "output", "up", "down")),
        EMBEDDING_SITE,
        *(site for i in range(last) for site in prefix(i)),
        f"prefix.qkv.{last}",
        *(f"expert.{part}.{i}" for i in range(config.layers) for part in gemma),
    )


def operands_of(layer: int) -> Operands:
    """Sites of what the attention of one layer of the prefix multiplies: queries, keys, values. They have no matrix."""
    query, key, value = (f"prefix.attention.{name}.{layer}" for name in ("query", "key", "value"))
    return query, key, value


def operand_sites(config: Pi05Config) -> dict[str, Operands]:
    """Product → sites of the queries, keys and values that it makes, where these are sites."""
    return {f"prefix.qkv.{layer}": operands_of(layer) for layer in range(config.layers - 1)}


def foldable_sites(config: Pi05Config) -> frozenset[str]:
    """Sites whose input comes straight from a norm, which can take a multiplier."""
    return frozenset(name for name in site_names(config) if name.split(".")[1] in ("qkv", "up", "gate_up"))


def site_matrices(weights: Pi05Weights) -> dict[str, Tensor]:
    """Site → matrix float[outputs, inputs]."""
    found: dict[str, Tensor] = {}

    def note(site: str, matrix: Tensor) -> Tensor:
        found[site] = matrix
        return matrix

    change_sites(weights, note)
    return found


def change_sites(weights: Pi05Weights, change: Change) -> Pi05Weights:
    """The same weights with `change(site, matrix)` in the place of each site's matrix."""
    vision, prefix, expert = weights.vision, weights.prefix, weights.expert
    return replace(
        weights,
        vision=replace(vision, layers=_layers(vision.layers, partial(_vision_layer, change))),
        prefix=replace(
            prefix,
            embedding=change(EMBEDDING_SITE, prefix.embedding),
            layers=_layers(prefix.layers, partial(_gemma_layer, change, "prefix")),
            last_key_value=change(f"prefix.qkv.{len(prefix.layers)}", prefix.last_key_value),
        ),
        expert=replace(expert, layers=_layers(expert.layers, partial(_gemma_layer, change, "expert"))),
    )


def _layers(layers: tuple[_Layer, ...], changed: Callable[[int, _Layer], _Layer]) -> tuple[_Layer, ...]:
    return tuple(changed(index, layer) for index, layer in enumerate(layers))


def _vision_layer(change: Change, index: int, layer: VisionLayer) -> VisionLayer:
    def dense(part: str, value: Dense) -> Dense:
        return replace(value, weight=change(f"vision.{part}.{index}", value.weight))

    return replace(
        layer,
        qkv=dense("qkv", layer.qkv),
        output=dense("output", layer.output),
        up=dense("up", layer.up),
        down=dense("down", layer.down),
    )


def _gemma_layer(change: Change, part: str, index: int, layer: GemmaLayer) -> GemmaLayer:
    return GemmaLayer(
        qkv=change(f"{part}.qkv.{index}", layer.qkv),
        output=change(f"{part}.output.{index}", layer.output),
        gate_up=change(f"{part}.gate_up.{index}", layer.gate_up),
        down=change(f"{part}.down.{index}", layer.down),
    )
