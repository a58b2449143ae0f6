"""The fused π0.5 pipeline for a GPU, in bfloat16: the same stages as `Pi05Stages`, the same buffers, fewer kernels.

Large products go to cuBLASLt or an own kernel, as `cuda_products` chooses, attention of vision and prefix to own
kernels, or to PyTorch where those do not serve; what stands between them is fused. Residual additions ride on the norm
behind them or on the product's accumulation, RMS norms on the step behind the product. On Hopper the prefix's product
of gate and up is an own kernel with GeGLU inside. The expert is one launch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ...contract import Variant
from ...engine import exact_float32
from ...ops import OpTable
from ...ops.cuda import gemm
from ...ops.cuda import rows as kernels
from ...ops.cuda.errors import KernelError
from ...ops.cuda.expert import ExpertKernel, ExpertScratch
from ...ops.padding import padded_shape, padded_size, with_padding
from ...precision.packed import PackedWeight
from .config import Pi05Config
from .cuda_attention import Attentions
from .cuda_expert import pack_expert
from .cuda_products import is_own, wide_linear
from .plan import image_buffer
from .stages import Pi05Stages
from .weights import Dense, ExpertWeights, Pi05Weights, VisionLayer

Arena = Mapping[str, Tensor]


class CudaStages(Pi05Stages):
    """Bodies for the same contract, fused. Everything that does not fit is refused when this is built.

    The expert's weights, and the tables of what its norms' shifts give, are copies of this moment: weights must not
    change afterwards.

    Args:
        persistent: the expert as one launch, otherwise phase by phase; equal bits.
        overlap: programmatic overlap of the launches between products; equal bits.
        fused_gate_up: the prefix's GeGLU inside its product, where the GPU can.
        fused_attention: the own attention kernels, where they serve.
    """

    fuses_gate_up: bool = False
    """GeGLU is inside its product."""
    gate_up_reason: str = ""
    """Why GeGLU is not inside its product although it was asked for."""
    wide_reason: str = ""
    """Why the own kernel multiplies nothing in vision's 16-bit layers, although it would (`OWN_WIDE`)."""

    def __init__(
        self,
        config: Pi05Config,
        weights: Pi05Weights,
        ops: OpTable,
        *,
        persistent: bool = True,
        overlap: bool = False,
        fused_gate_up: bool = True,
        fused_attention: bool = True,
    ) -> None:
        super().__init__(config, weights, ops)
        self._device = weights.vision.patch.device
        self._overlap = overlap
        self._patch = _padded(weights.vision.patch)
        self._vision_layers = tuple(map(_padded_layer, weights.vision.layers))
        self._patches, self._hidden = (
            torch.zeros(config.image_rows, padded_size(width), dtype=torch.bfloat16, device=self._device)
            for width in (config.patch_values, config.vision_hidden)
        )
        self.attentions = Attentions(config, self._device, overlap=overlap, fused=fused_attention)
        self._row_scale = torch.zeros(config.prefix_rows, device=self._device)
        self.gate_up_reason = gemm.unsuited(self._device) if fused_gate_up else ""
        self.fuses_gate_up = fused_gate_up and not self.gate_up_reason
        self._scratch = ExpertScratch.allocate(config.chunk, self._device)
        self._expert = self._build_expert(weights.expert, persistent=persistent, overlap=overlap)

    def _build_expert(self, weights: ExpertWeights, *, persistent: bool, overlap: bool) -> ExpertKernel | KernelError:
        """The kernel, or why this GPU or this chunk has none: that part alone runs as reference then."""
        config = self._config
        try:
            kernel = ExpertKernel(
                pack_expert(weights, config.chunk), config.chunk, config.steps, capacity=config.prefix_rows,
                persistent=persistent, overlap=overlap,
            )  # fmt: skip
        except KernelError as error:
            return error
        self._fill_tables(kernel)
        return kernel

    def _fill_tables(self, kernel: ExpertKernel) -> None:
        """Once, in the float32 of captures: the checkpoint stage makes equal modulations whenever it runs."""
        config = self._config
        sizes = config.steps, config.modulations, 3, config.expert_width
        modulation = torch.empty(sizes, device=self._device)
        with torch.no_grad(), exact_float32():
            self.modulate(modulation)
            kernel.prepare(modulation)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # whoever captures may do so on another one

    def choose_wide(self, reason: str) -> None:
        """From now on cuBLASLt alone multiplies vision's 16-bit layers, for that reason; not alone if it is empty."""
        self.wide_reason = reason

    def choose_gate_up(self, reason: str) -> None:
        """From now on cuBLASLt multiplies, and GeGLU is a kernel of its own, for that reason; fused if it is empty."""
        self.fuses_gate_up, self.gate_up_reason = not reason, reason

    # -- vision --------------------------------------------------------------------------------------------------------

    def vision(self, arena: Arena, variant: Variant) -> None:
        """Pixels → the image rows of the prefix."""
        config, weights = self._config, self._weights.vision
        patches = self._patches.view(len(config.views), config.patches, -1)
        read_pixels = self._ops.pixels_to_patches  # whoever replaced this op gives something else than pixels
        if "pixels_to_patches" not in self._ops.replaced():
            read_pixels = kernels.pixels_to_patches
        for index, view in enumerate(config.views):
            read_pixels(
                arena[image_buffer(view)], arena["image_format"][index], patch=config.patch_size, out=patches[index]
            )
        residual, normed = arena["vision_residual"], arena["vision_normed"]
        torch.addmm(weights.position, self._patches, self._patch.t(), out=residual)
        branch: Tensor | None = None
        for index in range(len(weights.layers)):
            branch = self._vision_layer(index, arena, branch)
        self._layer_norm(arena, weights.norm, branch)
        image_rows = arena["prefix_residual"][: config.image_rows]
        torch.addmm(weights.projector.bias, normed, weights.projector.weight.t(), out=image_rows)

    def _vision_layer(self, index: int, arena: Arena, branch: Tensor | None) -> Tensor:
        """Run one layer; return what is still to be added to the residual."""
        layer, hidden = self._vision_layers[index], self._hidden
        normed, qkv, added = (arena[f"vision_{name}"] for name in ("normed", "qkv", "attention"))
        self._layer_norm(arena, layer.norm1, branch)
        self._linear("vision.qkv", normed, layer.qkv, qkv)
        mixed = self.attentions.image(qkv, normed)
        self._linear("vision.output", mixed, layer.output, added)
        self._layer_norm(arena, layer.norm2, added)
        self._linear("vision.up", normed, layer.up, hidden, gelu=True)
        self._linear("vision.down", hidden, layer.down, added)
        return added

    def _linear(self, kind: str, x: Tensor, dense: Dense, out: Tensor, *, gelu: bool = False) -> None:
        own = not self.wide_reason and is_own(kind, self._device)
        wide_linear(x, dense.weight, dense.bias, out=out, own=own, overlap=self._overlap, gelu=gelu)

    def _layer_norm(self, arena: Arena, norm: Dense, branch: Tensor | None) -> None:
        kernels.layer_norm(
            arena["vision_residual"], norm.weight, norm.bias, eps=self._config.eps, out=arena["vision_normed"],
            branch=branch, overlap=self._overlap,
        )  # fmt: skip

    # -- prefix --------------------------------------------------------------------------------------------------------

    def prefix(self, arena: Arena, variant: Variant) -> None:
        """Image rows and prompt rows → keys and values of every layer."""
        config, rows = self._config, variant.dims["prefix"]
        residual = arena["prefix_residual"][:rows]
        residual[config.image_rows :].copy_(arena["prompt_embedding"][: rows - config.image_rows])
        self.attentions.take_valid(rows, arena["prefix_rows"])
        key_value = arena["key_value"][:, :, :rows].unsqueeze(3)
        branch: Tensor | None = None
        for index, (key, value) in enumerate(key_value[:-1]):
            branch = self._prefix_layer(index, arena, branch, key, value)
        self._last_key_value(arena, branch, *key_value[-1])

    def _last_key_value(self, arena: Arena, branch: Tensor | None, key: Tensor, value: Tensor) -> None:
        """Keys and values of the last layer; `branch` as in `_prefix_layer`."""
        rows = key.shape[0]
        residual, packed = arena["prefix_residual"][:rows], self._last_memory(arena, rows)
        torch.mm(residual, self._weights.prefix.last_key_value.t(), out=packed)
        self._write_qkv(arena, packed, None, key, value)

    def _last_memory(self, arena: Arena, rows: int) -> Tensor:
        """Memory for packed keys and values."""
        return arena["prefix_qkv"].flatten()[: rows * 2 * self._config.key_width].view(rows, -1)

    def _prefix_layer(
        self, index: int, arena: Arena, branch: Tensor | None, key: Tensor, value: Tensor
    ) -> Tensor | None:
        """Run one layer; return what is still to be added to the residual: nothing here, so that none comes in."""
        config, layer, rows = self._config, self._weights.prefix.layers[index], key.shape[0]
        residual, qkv, hidden, spare = (
            arena[f"prefix_{name}"][:rows] for name in ("residual", "qkv", "hidden", "normed")
        )
        query = qkv[:, : config.query_width].view(rows, config.query_heads, config.head_dim)
        torch.mm(residual, layer.qkv.t(), out=qkv)
        self._write_qkv(arena, qkv, query, key, value)
        mixed = self.attentions.prefix(query, key, value, arena["prefix_rows"], spare)
        residual.addmm_(mixed, layer.output.t())
        if self.fuses_gate_up:
            scale = self._row_scale[:rows]
            gemm.inverse_rms_rows(residual, eps=config.eps, out=scale, overlap=self._overlap)
            gemm.gate_up_geglu(
                residual, layer.gate_up, out=hidden, behind=gemm.Behind(scale=scale), overlap=self._overlap
            )
        else:
            gate_up = arena["prefix_gate_up"][:rows]
            torch.mm(residual, layer.gate_up.t(), out=gate_up)
            kernels.geglu(gate_up, out=hidden, residual=residual, eps=config.eps, overlap=self._overlap)
        residual.addmm_(hidden, layer.down.t())
        return None

    def _write_qkv(self, arena: Arena, qkv: Tensor, query: Tensor | None, key: Tensor, value: Tensor) -> None:
        """Apply the norm in front of the product, rotate and store."""
        rows = qkv.shape[0]
        kernels.split_rope_write(
            qkv, arena["rope"][:rows], query=query, key=key, value=value,
            residual=arena["prefix_residual"][:rows], eps=self._config.eps, overlap=self._overlap,
        )  # fmt: skip

    # -- expert --------------------------------------------------------------------------------------------------------

    def action(self, arena: Arena, variant: Variant) -> None:
        """Noise → actions, in `steps` Euler steps."""
        key_value = arena["key_value"]
        if isinstance(self._expert, KernelError):
            raise self._expert
        self._expert(
            arena["modulation"], arena["chunk_rope"], key_value[:, 0], key_value[:, 1], arena["prefix_rows"],
            arena["noise"], arena["actions"], self._scratch,
        )  # fmt: skip


def _padded(tensor: Tensor) -> Tensor:
    """The zeros behind it too."""
    return tensor.with_zeros() if isinstance(tensor, PackedWeight) else with_padding(tensor, padded_shape(tensor.shape))


def _padded_layer(layer: VisionLayer) -> VisionLayer:
    """The hidden values in whole lines: `up` writes zeros behind them, gelu(0) being 0, and `down` reads those."""
    up, down = (Dense(_padded(dense.weight), _padded(dense.bias)) for dense in (layer.up, layer.down))
    return replace(layer, up=up, down=down)
