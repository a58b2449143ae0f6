"""The products of π0.5's vision and prefix at their true sizes, and drawn operands with what they must give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product as combinations
from typing import Any

import torch
import torch.nn.functional as F
from _gpu import distance
from torch import Tensor

from flashrt_ros.ops.cuda import gemm_tiling
from flashrt_ros.ops.cuda.gemm import CODES, Behind
from flashrt_ros.ops.padding import padded_size
from flashrt_ros.policies.pi05.config import Pi05Config
from flashrt_ros.policies.pi05.cuda_products import PARTS_OF_K
from flashrt_ros.precision import e4m3

TWO_VIEWS = Pi05Config(views=("left", "right"), state_names=("joint",), action_names=("joint",))
_SPREAD = 60.0  # standard deviation of drawn codes, an eighth of the largest


@dataclass(frozen=True)
class Product:
    """A kind of site at its true size, and the variants of the own kernel that are worth measuring."""

    site: str
    rows: int
    inputs: int
    outputs: int
    layers: int
    operands: str = "e4m3"  # or "bf16"
    behind: str = ""  # "gelu" and "geglu" end in codes if the operands are codes
    bias: bool = False
    tiles: tuple[int, ...] = ()
    parts: tuple[int, ...] = (1,)
    consumers: tuple[int, ...] = (2,)
    rings: tuple[int, ...] = (0,)  # stages; 0: as many as there is memory for

    @property
    def results(self) -> int:
        """Values of a result row."""
        return self.outputs // 2 if self.behind == "geglu" else self.outputs

    @property
    def to_codes(self) -> bool:
        """Whether the own kernel stores codes."""
        return self.behind != "" and self.operands == "e4m3"

    def in_use(self, processors: int) -> dict[str, int]:
        """The variant that the fused stages take on a GPU of so many multiprocessors."""
        parts = 1 if self.operands == "bf16" else PARTS_OF_K.get(self.site, 1)
        rotated = 2 if self.site == "prefix.qkv" else None  # three consumers have no whole heads
        cut = gemm_tiling.tiling(self.rows, self.outputs, parts, processors, rotated)
        return {"tile_rows": cut.rows, "parts": parts, "consumers": cut.consumers}

    def variants(self, processors: int) -> Iterator[dict[str, int]]:
        """Choices of the own kernel; what is in use is among them."""
        used = self.in_use(processors)
        tiles = dict.fromkeys((used["tile_rows"], *self.tiles))
        parts = dict.fromkeys((used["parts"], *self.parts))
        for tile, part, consumers, ring in combinations(tiles, parts, self.consumers, self.rings):
            if tile <= gemm_tiling.MOST_ROWS[consumers]:
                variant = {"tile_rows": tile, "parts": part, "consumers": consumers}
                yield variant | ({"stages": ring} if ring else {})


def products(config: Pi05Config = TWO_VIEWS) -> tuple[Product, ...]:
    """All products of vision and prefix at the longest prompt."""
    vision, seen = config.vision_width, (config.image_rows, config.vision_layers)
    hidden = padded_size(config.vision_hidden)  # as the fused stages hold it
    width, wide, read = config.language_width, config.language_hidden, (config.prefix_rows, config.layers - 1)
    packed = config.query_width + 2 * config.key_width

    def of(site: str, size: tuple[int, int], inputs: int, outputs: int, **choices: Any) -> Product:
        return Product(site, size[0], inputs, outputs, size[1], **choices)

    return (
        of("vision.qkv", seen, vision, 3 * vision, bias=True, tiles=(256, 176, 128, 104)),
        of("vision.output", seen, vision, vision, bias=True, tiles=(176, 128, 80, 64, 40), parts=(1, 2, 3)),
        of("vision.up", seen, vision, hidden, behind="gelu", bias=True, tiles=(256, 176, 128, 64), consumers=(2, 3)),
        of("vision.down", seen, hidden, vision, bias=True, tiles=(256, 176, 128, 80), parts=(2, 3, 4, 7)),
        of("prefix.qkv", read, width, packed, tiles=(240, 192, 144, 128, 120)),
        of("prefix.output", read, config.query_width, width, tiles=(240, 192, 184, 144, 96), parts=(1, 2, 4)),
        of("prefix.gate_up", read, width, 2 * wide, behind="geglu", tiles=(240, 144), consumers=(2, 3), rings=(0, 3)),
        of("prefix.down", read, wide, width, tiles=(240, 184, 144), parts=(2, 3, 4, 5, 8), consumers=(2, 3)),
        of("prefix.gate_up", read, width, 2 * wide, operands="bf16", behind="geglu", tiles=(240,), consumers=(2, 3)),
    )  # fmt: skip


class Subject:
    """Drawn operands of one product, and what it must give.

    Args:
        product: its sizes.
        device: where the operands lie.
        generator: of that device.
    """

    def __init__(self, product: Product, device: torch.device, generator: torch.Generator) -> None:
        self.product, self._device, self._generator = product, device, generator
        draw = self.codes if product.operands == "e4m3" else self.wide
        self.x = draw(product.rows, product.inputs)
        self.weights = [draw(product.outputs, product.inputs) for _ in range(product.layers)]
        self.behind = self._behind()

    def wide(self, *shape: int) -> Tensor:
        """bf16 values of unit variance."""
        return torch.randn(*shape, device=self._device, generator=self._generator).bfloat16()

    def codes(self, *shape: int) -> Tensor:
        """E4M3 codes; one that saturates would be seven deviations away."""
        return (torch.randn(*shape, device=self._device, generator=self._generator) * _SPREAD).to(CODES)

    def _behind(self) -> Behind:
        """Factors that give sums a deviation of about one, and a scale for codes that the largest result just fits."""
        product, size = self.product, self.product.inputs**-0.5
        if product.operands == "bf16":
            return Behind(scale=torch.full((product.rows,), size, device=self._device))
        spread = torch.rand(product.outputs, device=self._device, generator=self._generator) + 0.5
        factor = spread * (size / _SPREAD**2)
        bias = self.wide(product.outputs) if product.bias else None
        gelu = product.behind == "gelu"
        if not product.to_codes:
            return Behind(factor=factor, bias=bias, gelu=gelu)
        largest = self._exact(Behind(factor=factor, bias=bias, gelu=gelu)).abs().max()
        return Behind(factor=factor, bias=bias, gelu=gelu, out_scale=e4m3.scale_for(largest).reshape(1))

    @cached_property
    def sums(self) -> Tensor:
        """The bare product of layer 0, float64[rows, outputs]."""
        return self.x.double() @ self.weights[0].double().t()

    @cached_property
    def exact(self) -> Tensor:
        """The product of layer 0 with all that is behind it, float64[rows, results]."""
        return self._exact(self.behind)

    def _exact(self, behind: Behind) -> Tensor:
        value = self.sums
        if behind.scale is not None:
            value = value * behind.scale.double()[:, None]
        if behind.factor is not None:
            value = value * behind.factor.double()
        if behind.bias is not None:
            value = value + behind.bias.double()
        if self.product.behind == "gelu":
            return F.gelu(value, approximate="tanh")
        if self.product.behind == "geglu":
            gate, up = value.chunk(2, dim=1)
            return F.gelu(gate, approximate="tanh") * up
        return value

    def rounding_error(self) -> float:
        """Distance of `exact` from itself, rounded once to what the own kernel stores."""
        if self.behind.out_scale is None:
            return distance(self.exact.bfloat16(), self.exact)
        codes = e4m3.quantise(self.exact.bfloat16(), self.behind.out_scale)
        return distance(e4m3.decode(codes) * self.behind.out_scale, self.exact)
