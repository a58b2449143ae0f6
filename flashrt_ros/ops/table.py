"""The op table: which implementation of every op a stage calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields

from .attention import chunk_attention, image_attention, prefix_attention
from .embed import count_tokens, embed
from .flow import euler_update
from .linear import geglu, linear
from .norms import gated_residual_ada_rms_norm, layer_norm, residual_rms_norm
from .pixels import pixels_to_patches
from .rope import rope_table, select_rows, split_rope_write

Op = Callable[..., None]


@dataclass(frozen=True)
class OpTable:
    """One callable for every op. Each field's contract is the reference function of the same name.

    Stage bodies call ops only through a table, so that a kernel can take the place of one reference without the stage
    knowing: `dataclasses.replace(reference_ops(), geglu=my_kernel)`.
    """

    pixels_to_patches: Op = field(default=pixels_to_patches)
    layer_norm: Op = field(default=layer_norm)
    residual_rms_norm: Op = field(default=residual_rms_norm)
    gated_residual_ada_rms_norm: Op = field(default=gated_residual_ada_rms_norm)
    linear: Op = field(default=linear)
    geglu: Op = field(default=geglu)
    rope_table: Op = field(default=rope_table)
    select_rows: Op = field(default=select_rows)
    split_rope_write: Op = field(default=split_rope_write)
    image_attention: Op = field(default=image_attention)
    prefix_attention: Op = field(default=prefix_attention)
    chunk_attention: Op = field(default=chunk_attention)
    embed: Op = field(default=embed)
    count_tokens: Op = field(default=count_tokens)
    euler_update: Op = field(default=euler_update)

    def replaced(self) -> tuple[str, ...]:
        """Names of the ops that are not the PyTorch reference."""
        reference = OpTable()
        return tuple(f.name for f in fields(self) if getattr(self, f.name) is not getattr(reference, f.name))


def reference_ops() -> OpTable:
    """The table of PyTorch references: it defines what every kernel must compute."""
    return OpTable()
