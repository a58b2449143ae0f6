"""The stage bodies of π0.5, written in ops."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from ...contract import Variant
from ...engine import StageBody
from ...ops import OpTable
from .config import Pi05Config
from .expert import denoise_step
from .prefix import encode_prefix
from .vision import encode_views
from .weights import Pi05Weights

Arena = Mapping[str, Tensor]


class Pi05Stages:
    """Bodies for the contract that `build_contract` makes of the same configuration.

    All of them can be captured: they read lengths on the device, and write into the arena.
    """

    def __init__(self, config: Pi05Config, weights: Pi05Weights, ops: OpTable) -> None:
        self._config, self._weights, self._ops = config, weights, ops

    def replace_ops(self, ops: OpTable) -> None:
        """Call `ops` from now on; before anything is captured."""
        self._ops = ops

    def bodies(self) -> dict[str, StageBody]:
        """Stage name → body, for the configured plan."""
        prepare: dict[str, StageBody] = {"checkpoint": self.checkpoint, "prompt": self.prompt}
        if self._config.plan == "full":
            return {**prepare, "full": self.full}
        return {**prepare, "context": self.context, "action": self.action}

    def parts(self) -> dict[str, StageBody]:
        """The pieces of a decision, in their order, for whoever measures each one on its own."""
        return {"vision": self.vision, "prefix": self.prefix, "expert": self.action}

    def checkpoint(self, arena: Arena, variant: Variant) -> None:
        """Time embeddings → every modulation of every step; positions → rotary table."""
        self.modulate(arena["modulation"])
        self._ops.rope_table(theta=self._config.rope_theta, out=arena["rope"])

    def modulate(self, out: Tensor) -> None:
        """out float32[steps, 2 * layers + 1, 3, expert width] = scale, shift and gate of every adaptive norm, which
        weights and step times decide alone."""
        time = self._weights.time
        condition = F.silu(F.linear(time.times, time.first.weight, time.first.bias))
        condition = F.silu(F.linear(condition, time.second.weight, time.second.bias))
        for site, dense in enumerate(time.modulations):
            modulation = F.linear(condition, dense.weight.float(), dense.bias.float())
            out[:, site].copy_(modulation.view(out[:, site].shape))

    def prompt(self, arena: Arena, variant: Variant) -> None:
        """Tokens → embeddings, the number of valid prefix rows, and the chunk's positions behind them."""
        bucket, config = variant.dims["prompt"], self._config
        self._ops.embed(
            arena["tokens"][:bucket],
            self._weights.prefix.embedding,
            scale=math.sqrt(config.language_width),
            out=arena["prompt_embedding"][:bucket],
        )
        self._ops.count_tokens(arena["tokens"], base=config.image_rows, out=arena["prefix_rows"])
        self._ops.select_rows(arena["rope"], arena["prefix_rows"], out=arena["chunk_rope"])

    def context(self, arena: Arena, variant: Variant) -> None:
        """Pixels and prompt → keys and values of the prefix."""
        self.vision(arena, variant)
        self.prefix(arena, variant)

    def vision(self, arena: Arena, variant: Variant) -> None:
        """Pixels → the image rows of the prefix."""
        encode_views(self._ops, self._config, self._weights.vision, arena)

    def prefix(self, arena: Arena, variant: Variant) -> None:
        """Image rows and prompt → keys and values of the prefix."""
        encode_prefix(self._ops, self._config, self._weights.prefix, arena, variant.dims["prefix"])

    def action(self, arena: Arena, variant: Variant) -> None:
        """Noise → actions, in `steps` Euler steps."""
        config, rows = self._config, variant.dims["prefix"]
        arena["actions"].copy_(arena["noise"])
        prefix = arena["key_value"][:, :, :rows].view(config.layers, 2, rows, config.key_heads, config.head_dim)
        for step in range(config.steps):
            denoise_step(self._ops, config, self._weights.expert, arena, prefix, arena["modulation"][step])

    def full(self, arena: Arena, variant: Variant) -> None:
        """Context, then action."""
        self.context(arena, variant)
        self.action(arena, variant)
