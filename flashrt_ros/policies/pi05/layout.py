"""The tensors of a π0.5 checkpoint: LeRobot's names and the shapes that a configuration demands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..base import CheckpointError
from .config import Pi05Config

Shape = tuple[int, ...]

VISION = "paligemma_with_expert.paligemma.model.vision_tower.vision_model"
PROJECTOR = "paligemma_with_expert.paligemma.model.multi_modal_projector.linear"
LANGUAGE = "paligemma_with_expert.paligemma.model.language_model"
EXPERT = "paligemma_with_expert.gemma_expert.model"
EMBEDDING = f"{LANGUAGE}.embed_tokens.weight"
TIED_EMBEDDING = "paligemma_with_expert.paligemma.lm_head.weight"  # the same tensor; writers keep either name
EXPERT_HEAD = "paligemma_with_expert.gemma_expert.lm_head.weight"  # part of the file, never used
_PREFIX = "model."  # PI05Policy's own name for PI05Pytorch
_SHOWN = 5  # names listed in one error message


def expected_shapes(config: Pi05Config) -> dict[str, Shape]:
    """Every tensor that must be there, without the leading `model.`."""
    return {
        **_vision(config),
        EMBEDDING: (config.vocabulary, config.language_width),
        f"{LANGUAGE}.norm.weight": (config.language_width,),
        **_language(config),
        **_expert(config),
        **_ends(config),
    }


def check_tensors(shapes: Mapping[str, Shape], config: Pi05Config, where: str) -> None:
    """Raise CheckpointError, naming every missing, surplus and misshapen tensor, unless `shapes` fit `config`.

    `shapes` must have canonical names (see `canonical_names`).
    """
    expected = expected_shapes(config)
    missing = sorted(set(expected) - set(shapes))
    surplus = sorted(set(shapes) - set(expected))
    misshapen = [
        f"{name} is {list(shapes[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in shapes and tuple(shapes[name]) != shape
    ]
    parts = [
        _listed("missing", missing),
        _listed("surplus", surplus),
        _listed("misshapen", misshapen),
    ]
    if any(parts):
        raise CheckpointError(
            f"{where} does not fit preset '{config.preset}': {'; '.join(filter(None, parts))}. "
            "Use the preset and sizes that it was trained with"
        )


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """Map canonical names to the names in the file.

    They lack `model.`, the embedding has its own name, and the expert's output head, which nothing uses, is left out.
    """
    found = {name.removeprefix(_PREFIX): name for name in names}
    found.pop(EXPERT_HEAD, None)
    tied = found.pop(TIED_EMBEDDING, None)
    if tied is not None:
        found.setdefault(EMBEDDING, tied)
    return found


def _listed(kind: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} {kind} ({', '.join(names[:_SHOWN])}{more})"


def _linear(name: str, outputs: int, inputs: int) -> dict[str, Shape]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _norm(name: str, width: int) -> dict[str, Shape]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _vision(config: Pi05Config) -> dict[str, Shape]:
    width, hidden, patch = config.vision_width, config.vision_hidden, config.patch_size
    shapes: dict[str, Shape] = {
        f"{VISION}.embeddings.patch_embedding.weight": (width, 3, patch, patch),
        f"{VISION}.embeddings.patch_embedding.bias": (width,),
        f"{VISION}.embeddings.position_embedding.weight": (config.patches, width),
        **_norm(f"{VISION}.post_layernorm", width),
        **_linear(PROJECTOR, config.language_width, width),
    }
    for index in range(config.vision_layers):
        layer = f"{VISION}.encoder.layers.{index}"
        for norm in ("layer_norm1", "layer_norm2"):
            shapes |= _norm(f"{layer}.{norm}", width)
        for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= _linear(f"{layer}.self_attn.{projection}", width, width)
        shapes |= _linear(f"{layer}.mlp.fc1", hidden, width) | _linear(f"{layer}.mlp.fc2", width, hidden)
    return shapes


def _gemma_layer(config: Pi05Config, layer: str, width: int, hidden: int) -> dict[str, Shape]:
    return {
        f"{layer}.self_attn.q_proj.weight": (config.query_width, width),
        f"{layer}.self_attn.k_proj.weight": (config.key_width, width),
        f"{layer}.self_attn.v_proj.weight": (config.key_width, width),
        f"{layer}.self_attn.o_proj.weight": (width, config.query_width),
        f"{layer}.mlp.gate_proj.weight": (hidden, width),
        f"{layer}.mlp.up_proj.weight": (hidden, width),
        f"{layer}.mlp.down_proj.weight": (width, hidden),
    }


def _language(config: Pi05Config) -> dict[str, Shape]:
    width = config.language_width
    shapes: dict[str, Shape] = {}
    for index in range(config.layers):
        layer = f"{LANGUAGE}.layers.{index}"
        shapes |= _gemma_layer(config, layer, width, config.language_hidden)
        shapes[f"{layer}.input_layernorm.weight"] = (width,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (width,)
    return shapes


def _expert(config: Pi05Config) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    for index in range(config.layers):
        shapes |= _gemma_layer(config, f"{EXPERT}.layers.{index}", config.expert_width, config.expert_hidden)
    for norm in modulation_names(config):
        shapes |= _linear(norm, 3 * config.expert_width, config.expert_width)
    return shapes


def modulation_names(config: Pi05Config) -> tuple[str, ...]:
    """The dense layer of every adaptive norm, in the order in which they run."""
    norms = ("input_layernorm", "post_attention_layernorm")
    inner = [f"{EXPERT}.layers.{i}.{norm}.dense" for i in range(config.layers) for norm in norms]
    return (*inner, f"{EXPERT}.norm.dense")


def _ends(config: Pi05Config) -> dict[str, Shape]:
    width = config.expert_width
    return {
        **_linear("action_in_proj", width, config.padded_width),
        **_linear("action_out_proj", config.padded_width, width),
        **_linear("time_mlp_in", width, width),
        **_linear("time_mlp_out", width, width),
    }
