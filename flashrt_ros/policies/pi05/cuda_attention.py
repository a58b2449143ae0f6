"""The attentions of vision and prefix on a GPU: the own kernels, or PyTorch's where those do not serve."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops.cuda import attention as library
from ...ops.cuda import image_attention as images
from ...ops.cuda import prefix_attention as prefixes
from ...ops.cuda.head_codes import HeadCodes
from ...ops.cuda.rows import Quantiser
from ...ops.report import KernelReport
from .config import Pi05Config
from .cuda_products import as_codes, quantised

IMAGE, PREFIX = "vision.attention", "prefix.attention"
OWN, LIBRARY = "fused", "pytorch"  # what a report says


class Attentions:
    """Both attentions. A result lies in the memory that is given for it, unless PyTorch makes it.

    Args:
        config: of the policy.
        device: where everything lies.
        overlap: programmatic overlap of the launches, also of those that quantise what PyTorch made; equal bits.
        fused: the own kernels, where they serve.
    """

    def __init__(self, config: Pi05Config, device: torch.device, *, overlap: bool, fused: bool = True) -> None:
        self._images, self._heads, self._overlap = len(config.views), config.vision_heads, overlap
        head_dim = config.vision_width // config.vision_heads
        asked = "the own kernel was not asked for"
        reasons = (images.unsuited(config.patches, head_dim), prefixes.unsuited(device)) if fused else (asked, asked)
        self._reasons = dict(zip((IMAGE, PREFIX), reasons, strict=True))
        rows = [config.image_rows + bucket for bucket in config.prompt_buckets]
        self._library = {count: library.PrefixAttention(count, device) for count in rows}

    def choose(self, attention: str, reason: str) -> None:
        """From now on PyTorch computes IMAGE or PREFIX, for that reason; the own kernel if it is empty."""
        self._reasons[attention] = reason

    def is_own(self, attention: str) -> bool:
        """Whether the own kernel computes IMAGE or PREFIX."""
        return not self._reasons[attention]

    def reports(self) -> tuple[KernelReport, ...]:
        """One on each."""
        return tuple(
            KernelReport(name, LIBRARY if reason else OWN, reason=reason) for name, reason in self._reasons.items()
        )

    def image(self, qkv: Tensor, memory: Tensor, quantiser: Quantiser | None = None) -> Tensor:
        """Attention within each image, bf16 or, with `quantiser`, codes [rows, width].

        Args:
            qkv: bf16[rows, 3 * width].
            memory: bf16[rows, width] for the result; what it holds is lost.
        """
        if not self.is_own(IMAGE):
            mixed = library.image_attention(qkv, images=self._images, heads=self._heads)
            return quantised(mixed, quantiser, self._overlap)
        out = memory if quantiser is None else as_codes(memory)
        images.image_attention(
            qkv, images=self._images, heads=self._heads, out=out, quantiser=quantiser, overlap=self._overlap
        )
        return out

    def prefix(
        self, query: Tensor, key: Tensor, value: Tensor, valid: Tensor, memory: Tensor,
        quantiser: Quantiser | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention of every row to the first `valid`, bf16 or, with `quantiser`, codes [rows, query width].

        Args:
            query: bf16[rows, heads, head_dim]; key, value: bf16[rows, key heads, head_dim].
            valid: int32[1] on the device; what `take_valid` was last called with.
            memory: bf16[rows, query width] for the result; what it holds is lost.
        """
        if not self.is_own(PREFIX):
            return quantised(self._library[query.shape[0]](query, key, value), quantiser, self._overlap)
        out = memory if quantiser is None else as_codes(memory)
        prefixes.prefix_attention(query, key, value, valid, out=out, quantiser=quantiser, overlap=self._overlap)
        return out

    def prefix_of_codes(
        self, codes: HeadCodes, valid: Tensor, memory: Tensor, quantiser: Quantiser | None = None
    ) -> Tensor:
        """The same of queries, keys and values that are codes; only where the own kernel computes PREFIX."""
        out = memory if quantiser is None else as_codes(memory)
        prefixes.prefix_attention_of_codes(codes, valid, out=out, quantiser=quantiser, overlap=self._overlap)
        return out

    def take_valid(self, rows: int, valid: Tensor) -> None:
        """Once in front of all layers of a prefix with `rows` rows."""
        if not self.is_own(PREFIX):
            self._library[rows].set_valid(valid)
