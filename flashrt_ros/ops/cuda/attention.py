"""Attention of vision and prefix, through the libraries that torch ships: lengths instead of masks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..shapes import check

_IMAGE_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


def image_attention(qkv: Tensor, *, images: int, heads: int) -> Tensor:
    """Full attention within each image: bf16[images * tokens, 3 * width] to bf16[images * tokens, width]."""
    rows, packed = qkv.shape
    width = packed // 3
    parts = qkv.view(images, rows // images, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
    with sdpa_kernel(_IMAGE_BACKENDS, set_priority=True):
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2])
    return mixed.transpose(1, 2).reshape(rows, width)


class PrefixAttention:
    """Attention of `rows` rows to the first `valid` of them, where `valid` is a number on the device.

    Args:
        rows: of query, key and value.
        device: where they are.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.rows = rows
        self._queries = torch.tensor([0, rows], dtype=torch.int32, device=device)
        self._keys = torch.zeros(2, dtype=torch.int32, device=device)

    def set_valid(self, valid: Tensor) -> None:
        """Take over int32[1] `valid`; once for all layers of a decision."""
        self._keys[1:].copy_(valid)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """bf16[rows, queries * head_dim] of query [rows, queries, head_dim] and key, value [rows, heads, head_dim]."""
        check(
            "prefix_attention",
            query=(query, (self.rows, "queries", "head_dim")),
            key=(key, (self.rows, "heads", "head_dim")),
            value=(value, (self.rows, "heads", "head_dim")),
        )
        mixed: Tensor = torch.ops.aten._flash_attention_forward(
            query, key, value, self._queries, self._keys, self.rows, self.rows, 0.0, False, False
        )[0]
        return mixed.view(self.rows, -1)
