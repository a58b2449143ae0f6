"""The execution contract of π0.5: which buffers there are, and which stage reads and writes them at which rate."""

from __future__ import annotations

from ...contract import Buffer, Contract, DType, Extent, Identity, Rate, Region, Role, Stage, Variant
from .config import DTYPES, Pi05Config

_BYTES_PER_PIXEL = 4  # RGBA is the widest format


def image_buffer(view: str) -> str:
    """Name of the window that holds the raw pixels of `view`."""
    return f"image.{view}"


def variant_name(bucket: int) -> str:
    """Name of the shape key for prompts of at most `bucket` tokens."""
    return f"prompt_{bucket}"


def build_contract(config: Pi05Config, identity: Identity) -> Contract:
    """The checked plan for `config`."""
    buffers = (*_windows(config), *_static(config), _key_value(config), *_scratch(config))
    return Contract(
        name="pi05",
        buffers=buffers,
        stages=_stages(config),
        identity=identity,
        regions=_regions({buffer.name: buffer for buffer in buffers}, config),
        extents=(Extent("prefix_rows", config.prefix_rows), Extent("prompt_rows", config.prompt_buckets[-1])),
        variants=tuple(
            Variant(variant_name(bucket), {"prompt": bucket, "prefix": config.image_rows + bucket})
            for bucket in config.prompt_buckets
        ),
    )


def _windows(config: Pi05Config) -> tuple[Buffer, ...]:
    capacity = config.max_pixels * _BYTES_PER_PIXEL
    actions = (config.chunk, config.padded_width)

    def window(name: str, shape: tuple[int, ...], dtype: DType, rate: Rate | None, doc: str) -> Buffer:
        return Buffer(name, shape, dtype, Role.SWAP, rate, doc)

    return (
        *(
            window(image_buffer(view), (capacity,), DType.UINT8, Rate.OBSERVATION, "raw pixels, rows packed")
            for view in config.views
        ),
        window(
            "image_format",
            (len(config.views), 4),
            DType.INT32,
            Rate.OBSERVATION,
            "height, width, channels and channel order of each view",
        ),
        window("tokens", (config.prompt_buckets[-1],), DType.INT32, Rate.PROMPT, "token ids, -1 behind the last"),
        window("noise", actions, DType.FLOAT32, Rate.STEP, "start of the flow, N(0, 1)"),
        window("actions", actions, DType.FLOAT32, None, "normalised actions, padded to the model's width"),
    )


def _static(config: Pi05Config) -> tuple[Buffer, ...]:
    dtype = DTYPES[config.dtype]

    def static(name: str, shape: tuple[int, ...], dtype: DType, doc: str) -> Buffer:
        return Buffer(name, shape, dtype, Role.STATIC, doc=doc)

    return (
        static(
            "modulation",
            (config.steps, config.modulations, 3, config.expert_width),
            DType.FLOAT32,
            "scale, shift and gate of every adaptive norm at every step",
        ),
        static(
            "rope",
            (config.prefix_rows + config.chunk, config.head_dim),
            dtype,
            "cosines then sines of every position",
        ),
        static(
            "prompt_embedding",
            (config.prompt_buckets[-1], config.language_width),
            dtype,
            "token embeddings, scaled",
        ),
        static("chunk_rope", (config.chunk, config.head_dim), dtype, "rows of `rope` behind the last valid prefix row"),
        static("prefix_rows", (1,), DType.INT32, "valid prefix rows: all image rows and the tokens that are there"),
    )


def _key_value(config: Pi05Config) -> Buffer:
    shape = (config.layers, 2, config.prefix_rows, config.key_width)
    return Buffer(
        "key_value", shape, DTYPES[config.dtype], Role.STATE, doc="keys, then values, of every layer's prefix"
    )


def _scratch(config: Pi05Config) -> tuple[Buffer, ...]:
    dtype = DTYPES[config.dtype]
    groups = (
        (config.image_rows, _vision_widths(config)),
        (config.prefix_rows, _prefix_widths(config)),
        (config.chunk, _expert_widths(config)),
    )
    return tuple(
        Buffer(name, (rows, width), dtype, Role.SCRATCH) for rows, widths in groups for name, width in widths.items()
    )


def _vision_widths(config: Pi05Config) -> dict[str, int]:
    width = config.vision_width
    return {
        "vision_patches": config.patch_values,
        "vision_residual": width,
        "vision_normed": width,
        "vision_qkv": 3 * width,
        "vision_attention": width,
        "vision_hidden": config.vision_hidden,
    }


def _prefix_widths(config: Pi05Config) -> dict[str, int]:
    width, queries = config.language_width, config.query_width
    return {
        "prefix_residual": width,
        "prefix_normed": width,
        "prefix_qkv": queries + 2 * config.key_width,
        "prefix_query": queries,
        "prefix_attention": queries,
        "prefix_branch": width,
        "prefix_gate_up": 2 * config.language_hidden,
        "prefix_hidden": config.language_hidden,
    }


def _expert_widths(config: Pi05Config) -> dict[str, int]:
    width, queries = config.expert_width, config.query_width
    return {
        "expert_residual": width,
        "expert_normed": width,
        "expert_qkv": queries + 2 * config.key_width,
        "expert_query": queries,
        "expert_key": config.key_width,
        "expert_value": config.key_width,
        "expert_attention": queries,
        "expert_branch": width,
        "expert_gate_up": 2 * config.expert_hidden,
        "expert_hidden": config.expert_hidden,
    }


def _stages(config: Pi05Config) -> tuple[Stage, ...]:
    variants = tuple(variant_name(bucket) for bucket in config.prompt_buckets)
    context = Stage(
        "context",
        Rate.OBSERVATION,
        reads=(*map(image_buffer, config.views), "image_format", "prompt_embedding", "prefix_rows", "rope"),
        writes=("key_value", *_vision_widths(config), *_prefix_widths(config)),
        variants=variants,
        doc="pixels and prompt to the prefix's keys and values",
    )
    action = Stage(
        "action",
        Rate.STEP,
        reads=("noise", "key_value", "chunk_rope", "prefix_rows", "modulation"),
        writes=("actions", *_expert_widths(config)),
        variants=variants,
        doc="noise to actions, in Euler steps",
    )
    prepare = (
        Stage("checkpoint", Rate.CHECKPOINT, writes=("modulation", "rope"), doc="tables that only the weights decide"),
        Stage(
            "prompt",
            Rate.PROMPT,
            reads=("tokens", "rope"),
            writes=("prompt_embedding", "chunk_rope", "prefix_rows"),
            variants=variants,
            doc="tokens to embeddings, valid rows and the chunk's positions",
        ),
    )
    return (*prepare, context, action) if config.plan == "split" else (*prepare, _fused(context, action))


def _fused(context: Stage, action: Stage) -> Stage:
    reads = [name for name in dict.fromkeys((*context.reads, *action.reads)) if name != "key_value"]
    return Stage(
        "full",
        Rate.STEP,
        reads=tuple(reads),
        writes=(*context.writes, *action.writes),
        variants=context.variants,
        doc="pixels, prompt and noise to actions, in one piece",
    )


def _regions(buffers: dict[str, Buffer], config: Pi05Config) -> tuple[Region, ...]:
    def whole(name: str, blocks: int = 1, live: str | None = None) -> Region:
        return Region(name, name, 0, buffers[name].nbytes, blocks, live)

    return (
        whole("key_value", blocks=2 * config.layers, live="prefix_rows"),
        whole("prompt_embedding", live="prompt_rows"),
        *(whole(name) for name in ("chunk_rope", "prefix_rows", "tokens", "noise", "actions")),
    )
