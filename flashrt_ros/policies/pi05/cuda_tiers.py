"""The fused stages for weights in a precision tier: layers of vision and prefix with packed sites.

A norm, an attention, a GELU or a GeGLU writes the codes that the product behind it reads; only what PyTorch or cuBLASLt
computes is quantised in a step of its own. A layer whose sites are all 16-bit runs as in `CudaStages`. How each site is
multiplied is chosen in `cuda_products`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ...ops import OpTable
from ...ops.cuda import rows as kernels
from ...ops.cuda.errors import KernelError
from ...ops.cuda.gemm import Heads
from ...ops.cuda.head_codes import HeadCodes
from ...ops.report import KernelReport
from ...precision.packed import PackedWeight
from .config import Pi05Config
from .cuda_attention import IMAGE, PREFIX
from .cuda_expert import expert_reports
from .cuda_products import CUBLASLT, CodesProduct, Product, as_codes, kind_of, owns_any, product_of
from .cuda_stages import Arena, CudaStages
from .weights import Dense, GemmaLayer, Pi05Weights, VisionLayer

FUSED = "fused"  # what a report says
GATE_UP, WIDE_VISION = "gate_up", "vision.wide"  # steps of 16-bit layers that a library can do too
STEPS = {GATE_UP: "prefix", WIDE_VISION: "vision"}  # step → the part that it is of


@dataclass(frozen=True)
class LayerProducts:
    """The four products of a layer; `up` is gate and up in the prefix."""

    qkv: Product
    output: Product
    up: Product
    down: Product


@dataclass(frozen=True)
class PartProducts:
    """The products of vision or prefix.

    Attributes:
        layers: None for a layer that is all 16-bit.
        last: keys and values of the last prefix layer; None where they are 16-bit, and in vision.
    """

    layers: tuple[LayerProducts | None, ...]
    last: Product | None = None


class TierStages(CudaStages):
    """`CudaStages` that also reads packed weights.

    A part with a site that this GPU cannot multiply is told when it is called: a `KernelError` that names the site.
    """

    def __init__(self, config: Pi05Config, weights: Pi05Weights, ops: OpTable, **switches: bool) -> None:
        super().__init__(config, weights, ops, **switches)
        self._products: dict[str, Product] = {}
        self._vision = _or_error(self._vision_products)
        self._prefix = _or_error(self._prefix_products)
        self.has_wide_prefix = isinstance(self._prefix, PartProducts) and None in self._prefix.layers
        """A layer of the prefix runs as in 16-bit, and so does its product of gate and up."""
        self._codes = self._code_memory()

    def optional_of_vision(self) -> tuple[str, ...]:
        """Steps that may be left out of the fused vision, see `leave_out`."""
        attention = (IMAGE,) if self.attentions.is_own(IMAGE) else ()
        wide = isinstance(self._vision, PartProducts) and None in self._vision.layers
        return (*attention, WIDE_VISION) if wide and owns_any(self._device) else attention

    def optional_of_prefix(self) -> tuple[str, ...]:
        """Steps that may be left out of the fused prefix."""
        attention = (PREFIX,) if self.attentions.is_own(PREFIX) else ()
        return (*attention, GATE_UP) if self.fuses_gate_up and self.has_wide_prefix else attention

    def leave_out(self, step: str, reason: str) -> None:
        """Let a library do that step, for that reason; if it is empty, the own kernel."""
        if step == GATE_UP:
            self.choose_gate_up(reason)
        elif step == WIDE_VISION:
            self.choose_wide(reason)
        else:
            self.attentions.choose(step, reason)

    def step_reports(self) -> tuple[KernelReport, ...]:
        """Of the 16-bit layers: the prefix's gate and up, if there are any, and what was left out of vision."""
        gate_up = KernelReport(GATE_UP, FUSED if self.fuses_gate_up else CUBLASLT, reason=self.gate_up_reason)
        vision = KernelReport(WIDE_VISION, CUBLASLT, reason=self.wide_reason)
        return *((gate_up,) if self.has_wide_prefix else ()), *((vision,) if self.wide_reason else ())

    def product_reports(self) -> tuple[KernelReport, ...]:
        """How the products of each kind are multiplied, where not all of a part is 16-bit."""
        ways: dict[str, list[str]] = {}
        reasons: dict[str, list[str]] = {}
        for site, product in self._products.items():
            ways.setdefault(kind_of(site), []).append(product.way)
            reasons.setdefault(kind_of(site), []).append(product.reason)
        made = (
            KernelReport(kind, " and ".join(_distinct(ways[kind])), "; ".join(_distinct(reasons[kind])))
            for kind in ways
        )
        return (*made, *expert_reports(self._weights.expert))

    def _make(self, site: str, weight: Tensor, bias: Tensor | None = None) -> Product:
        product = product_of(site, weight, bias, overlap=self._overlap)
        self._products[site] = product
        return product

    # -- vision --------------------------------------------------------------------------------------------------------

    def _vision_products(self) -> PartProducts:
        def of_layer(index: int, layer: VisionLayer) -> LayerProducts | None:
            denses = {"qkv": layer.qkv, "output": layer.output, "up": layer.up, "down": layer.down}
            if not any(isinstance(dense.weight, PackedWeight) for dense in denses.values()):
                return None
            return LayerProducts(
                **{name: self._make(f"vision.{name}.{index}", d.weight, d.bias) for name, d in denses.items()}
            )

        return PartProducts(tuple(of_layer(i, layer) for i, layer in enumerate(self._vision_layers)))

    def _vision_layer(self, index: int, arena: Arena, branch: Tensor | None) -> Tensor:
        products = _there(self._vision).layers[index]
        if products is None:
            return super()._vision_layer(index, arena, branch)
        layer, spare = self._vision_layers[index], _spare(arena)
        qkv, hidden = arena["vision_qkv"], self._hidden
        products.qkv.linear(self._vision_input(arena, layer.norm1, branch, products.qkv), qkv, spare)
        mixed = self.attentions.image(qkv, arena["vision_normed"], products.output.quantiser)
        added = products.output.branch(mixed, spare)
        normed = self._vision_input(arena, layer.norm2, added, products.up)
        return products.down.branch(products.up.gelu(normed, hidden, spare, products.down.quantiser), spare)

    def _vision_input(self, arena: Arena, norm: Dense, branch: Tensor | None, product: Product) -> Tensor:
        """Add the branch; the normalised rows as `product` takes them."""
        out = _as_input(arena["vision_normed"], product)
        kernels.layer_norm(
            arena["vision_residual"], norm.weight, norm.bias, eps=self._config.eps, out=out, branch=branch,
            quantiser=product.quantiser, overlap=self._overlap,
        )  # fmt: skip
        return out

    # -- prefix --------------------------------------------------------------------------------------------------------

    def _prefix_products(self) -> PartProducts:
        def of_layer(index: int, layer: GemmaLayer) -> LayerProducts | None:
            matrices = {"qkv": layer.qkv, "output": layer.output, "gate_up": layer.gate_up, "down": layer.down}
            if not any(isinstance(matrix, PackedWeight) for matrix in matrices.values()):
                return None
            made = {name: self._make(f"prefix.{name}.{index}", matrix) for name, matrix in matrices.items()}
            return LayerProducts(made["qkv"], made["output"], made["gate_up"], made["down"])

        weights = self._weights.prefix
        layers = tuple(of_layer(index, layer) for index, layer in enumerate(weights.layers))
        if not isinstance(weights.last_key_value, PackedWeight):
            return PartProducts(layers)
        return PartProducts(layers, self._make(f"prefix.qkv.{len(layers)}", weights.last_key_value))

    def _prefix_layer(
        self, index: int, arena: Arena, branch: Tensor | None, key: Tensor, value: Tensor
    ) -> Tensor | None:
        products, rows = _there(self._prefix).layers[index], key.shape[0]
        if products is None:
            self._add(arena, rows, branch)
            return super()._prefix_layer(index, arena, None, key, value)
        config, spare = self._config, _spare(arena)
        qkv, hidden = arena["prefix_qkv"][:rows], arena["prefix_hidden"][:rows]
        memory, wanted = arena["prefix_normed"][:rows], products.output.quantiser
        codes, normed = self._head_codes(products.qkv, rows), self._prefix_input(arena, rows, branch, products.qkv)
        if codes is None:
            query = qkv[:, : config.query_width].view(rows, config.query_heads, config.head_dim)
            products.qkv.heads(normed, qkv, Heads(arena["rope"][:rows], query, key, value), spare)
            mixed = self.attentions.prefix(query, key, value, arena["prefix_rows"], memory, wanted)
        else:
            products.qkv.heads(normed, qkv, Heads(arena["rope"][:rows], None, key, value, codes), spare)
            mixed = self.attentions.prefix_of_codes(codes, arena["prefix_rows"], memory, wanted)
        normed = self._prefix_input(arena, rows, products.output.branch(mixed, spare), products.up)
        return products.down.branch(products.up.geglu(normed, hidden, spare, products.down.quantiser), spare)

    def _code_memory(self) -> HeadCodes | None:
        """For queries, keys and values of one layer, if any has codes of them."""
        layers = self._prefix.layers if isinstance(self._prefix, PartProducts) else ()
        for layer in layers:
            scales = None if layer is None else _head_scales(layer.qkv)
            if scales is not None:
                return HeadCodes.allocate(self._config.prefix_rows, scales)
        return None

    def _head_codes(self, product: Product, rows: int) -> HeadCodes | None:
        """Where `product` writes codes for attention; None where attention takes bfloat16."""
        scales = _head_scales(product)
        if scales is None or self._codes is None or not self.attentions.is_own(PREFIX):
            return None
        return self._codes.first(rows, scales)

    def _last_key_value(self, arena: Arena, branch: Tensor | None, key: Tensor, value: Tensor) -> None:
        product, rows = _there(self._prefix).last, key.shape[0]
        if product is None:
            self._add(arena, rows, branch)
            return super()._last_key_value(arena, None, key, value)
        heads, memory = Heads(arena["rope"][:rows], None, key, value), self._last_memory(arena, rows)
        return product.heads(self._prefix_input(arena, rows, branch, product), memory, heads, _spare(arena))

    def _prefix_input(self, arena: Arena, rows: int, branch: Tensor | None, product: Product | None) -> Tensor:
        """Add the branch; the normalised rows as `product` takes them."""
        out = _as_input(arena["prefix_normed"][:rows], product)
        kernels.residual_rms_norm(
            arena["prefix_residual"][:rows], branch, eps=self._config.eps, out=out,
            quantiser=None if product is None else product.quantiser, overlap=self._overlap,
        )  # fmt: skip
        return out

    def _add(self, arena: Arena, rows: int, branch: Tensor | None) -> None:
        """Add the branch in front of a layer that takes none; the norm that comes with that is not used."""
        if branch is not None:
            self._prefix_input(arena, rows, branch, None)


def _head_scales(product: Product) -> Tensor | None:
    return product.head_scales if isinstance(product, CodesProduct) else None


def _as_input(buffer: Tensor, product: Product | None) -> Tensor:
    return buffer if product is None or product.quantiser is None else as_codes(buffer)


def _spare(arena: Arena) -> Tensor:
    """The largest scratch of the context, which fused products of gate and up leave unused."""
    return arena["prefix_gate_up"].flatten()


def _distinct(texts: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text for text in texts if text))


def _or_error(make: Callable[[], PartProducts]) -> PartProducts | KernelError:
    """What `make` gives, or why there is none: that part alone runs as reference then."""
    try:
        return make()
    except KernelError as error:
        return error


def _there(products: PartProducts | KernelError) -> PartProducts:
    if isinstance(products, KernelError):
        raise products
    return products
