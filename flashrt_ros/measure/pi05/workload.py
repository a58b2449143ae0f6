"""Operations and bytes of π0.5's stages, from its contract and its configuration."""

from __future__ import annotations

from ...contract import Contract, Role, Variant
from ...policies.pi05.config import Pi05Config
from ...policies.pi05.plan import image_buffer
from ..roofline import Work

FRAME = 480 * 640 * 3  # bytes of a camera frame that count as read, of a window that can hold a larger one


def workload(config: Pi05Config, contract: Contract, variant: Variant, frame: int = FRAME) -> dict[str, Work]:
    """What vision, prefix and expert must do in one decision.

    Buffers count once for each stage that reads or writes them, in their live rows; scratch does not count, because it
    can stay on the chip. What the expert reads counts in every step: the weights in between are larger than any cache.
    """
    prefix_rows = variant.dims["prefix"]
    vision, prefix, expert = _vision_weights(config), _prefix_weights(config), _expert_weights(config)
    context, action = _stage_bytes(config, contract, variant, frame)
    images = sum(nbytes for name, nbytes in context.items() if name.startswith("image"))
    steps = config.steps
    repeated = action.pop("key_value") * steps
    return {
        "vision": Work(
            2 * config.image_rows * vision + _attention(config.image_rows, config.patches, config.vision_width)
            * config.vision_layers,
            vision, images,
        ),
        "prefix": Work(
            2 * prefix_rows * prefix
            + _attention(prefix_rows, prefix_rows, config.query_width) * (config.layers - 1),
            prefix, sum(context.values()) - images,
        ),
        "expert": Work(
            steps * (2 * config.chunk * expert
                     + _attention(config.chunk, prefix_rows + config.chunk, config.query_width) * config.layers),
            steps * expert, repeated + sum(action.values()), narrowed=True,
        ),
    }  # fmt: skip


def _stage_bytes(
    config: Pi05Config, contract: Contract, variant: Variant, frame: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Live bytes of what the context and the action touch, by buffer; the two plans touch the same."""
    touched: dict[str, set[str]] = {"context": set(), "action": set()}
    for stage in contract.stages:
        names = set(stage.reads) | set(stage.writes)
        if stage.name in touched:
            touched[stage.name] |= names
        elif stage.name == "full":
            action = {"noise", "chunk_rope", "modulation", "actions", "key_value", "prefix_rows"}
            touched["action"] |= names & action
            touched["context"] |= names - (action - {"key_value", "prefix_rows"})
    live = {image_buffer(view): float(frame) for view in config.views}

    def size(name: str) -> float:
        buffer = contract.buffer(name)
        if name in live:
            return live[name]
        rows = {"key_value": (2, "prefix"), "rope": (0, "prefix"), "prompt_embedding": (0, "prompt")}.get(name)
        share = 1.0 if rows is None else variant.dims[rows[1]] / buffer.shape[rows[0]]
        return buffer.nbytes * share

    def sizes(names: set[str]) -> dict[str, float]:
        return {name: size(name) for name in sorted(names) if contract.buffer(name).role is not Role.SCRATCH}

    return sizes(touched["context"]), sizes(touched["action"])


def _attention(rows: int, keys: int, width: int) -> float:
    """Operations of scores and mixture in one layer."""
    return 4.0 * rows * keys * width


def _vision_weights(config: Pi05Config) -> float:
    width = config.vision_width
    layer = 4 * width * width + 2 * width * config.vision_hidden
    return config.vision_layers * layer + width * (config.patch_values + config.language_width)


def _gemma_layer(config: Pi05Config, width: int, hidden: int) -> float:
    projections = (2 * config.query_width + 2 * config.key_width) * width
    return projections + 3 * width * hidden


def _prefix_weights(config: Pi05Config) -> float:
    """All layers but the last, of which keys and values are all that is used."""
    layer = _gemma_layer(config, config.language_width, config.language_hidden)
    return (config.layers - 1) * layer + 2 * config.key_width * config.language_width


def _expert_weights(config: Pi05Config) -> float:
    ends = 2 * config.expert_width * config.padded_width
    return config.layers * _gemma_layer(config, config.expert_width, config.expert_hidden) + ends
