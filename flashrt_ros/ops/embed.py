"""Token embedding with a device-side count of the tokens that are there."""

from __future__ import annotations

import torch
from torch import Tensor

from .shapes import check

ABSENT = -1  # token id that marks a place behind the end of the text


def embed(tokens: Tensor, table: Tensor, *, scale: float, out: Tensor) -> None:
    """out[i] = table[tokens[i]] * scale; absent tokens take row 0, which nothing may attend to.

    tokens int32[rows], table float[vocabulary, width], out float[rows, width].
    """
    check("embed", tokens=(tokens, "rows"), table=(table, "vocabulary width"), out=(out, "rows width"))
    out.copy_(table.index_select(0, tokens.clamp(min=0)).float() * scale)


def count_tokens(tokens: Tensor, *, base: int, out: Tensor) -> None:
    """out int32[1] = base + the number of tokens that are not absent."""
    check("count_tokens", tokens=(tokens, "rows"), out=(out, "1"))
    out.copy_((tokens != ABSENT).sum(dtype=torch.int32) + base)
