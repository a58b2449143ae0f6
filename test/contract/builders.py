"""A small, complete contract in the shape of a policy, for tests to bend."""

from __future__ import annotations

from typing import Any

from flashrt_ros.contract import (
    Buffer,
    Contract,
    DType,
    Extent,
    Identity,
    Rate,
    Region,
    Role,
    Stage,
    Variant,
)

BUFFERS = (
    Buffer("image", (8,), DType.UINT8, Role.SWAP, Rate.OBSERVATION),
    Buffer("tokens", (4,), DType.INT32, Role.SWAP, Rate.PROMPT),
    Buffer("noise", (4,), DType.FLOAT32, Role.SWAP, Rate.OBSERVATION),
    Buffer("table", (4,), DType.FLOAT32, Role.STATIC),
    Buffer("prompt", (4,), DType.FLOAT32, Role.STATIC),
    Buffer("kv", (2, 6, 4), DType.FLOAT32, Role.STATE),
    Buffer("hidden", (4,), DType.FLOAT32, Role.SCRATCH),
    Buffer("actions", (4,), DType.FLOAT32, Role.SWAP),
)
STAGES = (
    Stage(
        "action",
        Rate.STEP,
        reads=("kv", "noise", "table"),
        writes=("hidden", "actions"),
    ),
    Stage(
        "context",
        Rate.OBSERVATION,
        reads=("image", "prompt"),
        writes=("kv",),
        variants=("short", "long"),
    ),
    Stage(
        "prompt",
        Rate.PROMPT,
        reads=("tokens",),
        writes=("prompt",),
        variants=("short", "long"),
    ),
    Stage("tables", Rate.CHECKPOINT, writes=("table",)),
)
REGIONS = (
    Region("kv", "kv", 0, 2 * 6 * 4 * 4, blocks=2, live="rows"),
    Region("prompt", "prompt", 0, 16),
)
IDENTITY = Identity(policy="toy", weights="ab" * 32, views=("front",), chunk=4, horizon=2)


def make_contract(**changes: object) -> Contract:
    """The toy contract, with whole parts replaced by keyword."""
    parts: dict[str, object] = {
        "name": "toy",
        "buffers": BUFFERS,
        "stages": STAGES,
        "identity": IDENTITY,
        "regions": REGIONS,
        "extents": (Extent("rows", 6),),
        "variants": (Variant("short", {"tokens": 2}), Variant("long", {"tokens": 4})),
    }
    return Contract(**{**parts, **changes})  # type: ignore[arg-type]


def replaced(items: tuple[Any, ...], name: str, *new: object) -> tuple[Any, ...]:
    """`items` with the one called `name` replaced by `new`."""
    return tuple(x for item in items for x in (new if item.name == name else (item,)))
