"""The weights as the stages read them: packed, folded and cast once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...engine.dtypes import TORCH_DTYPE
from ...engine.upload import Uploader
from ...ops.padding import in_padded_memory, padded_shape
from ..progress import Advance
from .config import DTYPES, Pi05Config
from .layout import EMBEDDING, EXPERT, LANGUAGE, PROJECTOR, VISION, modulation_names
from .source import TensorSource


def _untold(count: int) -> None:
    """Nobody watches."""


@dataclass(frozen=True)
class Dense:
    """One linear layer: weight [outputs, inputs] and bias [outputs]."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True)
class VisionLayer:
    """One layer of the vision encoder; `qkv` packs query, key and value rows."""

    norm1: Dense
    qkv: Dense
    output: Dense
    norm2: Dense
    up: Dense
    down: Dense


@dataclass(frozen=True)
class VisionWeights:
    """Vision encoder and projector.

    `position` [image rows, width] repeats the position embedding for every view and holds the patch bias.
    """

    patch: Tensor
    position: Tensor
    layers: tuple[VisionLayer, ...]
    norm: Dense
    projector: Dense


@dataclass(frozen=True)
class GemmaLayer:
    """One layer of the prefix encoder or of the expert.

    `qkv` packs query, key and value rows, `gate_up` gate rows then up rows. In the prefix, the weights (1 + w) of both
    norms are folded into `qkv` and `gate_up`.
    """

    qkv: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class PrefixWeights:
    """Prefix encoder: all layers but the last, and the last one's key and value rows (nothing else of it is read)."""

    embedding: Tensor
    layers: tuple[GemmaLayer, ...]
    last_key_value: Tensor


@dataclass(frozen=True)
class ExpertWeights:
    """Action expert; `leave` is the action output projection times the Euler step. Both ends are float32."""

    enter: Dense
    layers: tuple[GemmaLayer, ...]
    leave: Dense


@dataclass(frozen=True)
class TimeWeights:
    """What turns the time of each Euler step into modulations, read once.

    `times` float32[steps, width] are the sinusoidal embeddings; `modulations` are the dense layers of the adaptive
    norms in the order in which they run, in the checkpoint's own precision.
    """

    times: Tensor
    first: Dense
    second: Dense
    modulations: tuple[Dense, ...]


@dataclass(frozen=True)
class Pi05Weights:
    """All weights on one device."""

    vision: VisionWeights
    prefix: PrefixWeights
    expert: ExpertWeights
    time: TimeWeights


def load_weights(
    source: TensorSource,
    config: Pi05Config,
    device: torch.device,
    advance: Advance = _untold,
    *,
    padded: bool = False,
) -> Pi05Weights:
    """Pack the tensors of `source` for `config`; folding and scaling happen in float32, before the cast.

    Args:
        advance: is told how many bytes of `source` each step has read, and in the end how many nobody needs.
        padded: patch, up and down of vision lie in memory with room for the padding that fused stages multiply them
            with (`ops.padding`), so that these make no copies; shapes and values are the same.
    """
    loader = (_ShapeLoader if device.type == "meta" else _Loader)(source, config, device, advance, padded)
    weights = Pi05Weights(loader.vision(), loader.prefix(), loader.expert(), loader.time())
    advance(source.nbytes - loader.read)
    return weights


def time_embeddings(config: Pi05Config) -> Tensor:
    """float32[steps, expert width]: sines then cosines of the time 1, 1 - 1/steps, ... in each frequency."""
    half = config.expert_width // 2
    fraction = torch.linspace(0, 1, half, dtype=torch.float64)
    period = config.min_period * (config.max_period / config.min_period) ** fraction
    # Times are float32 values, as training saw them; the angles need more.
    times = torch.tensor([1.0 - step / config.steps for step in range(config.steps)], dtype=torch.float32)
    angles = (2 * math.pi / period)[None, :] * times[:, None].double()
    return torch.cat((angles.sin(), angles.cos()), dim=1).float()


class _Loader:
    def __init__(
        self, source: TensorSource, config: Pi05Config, device: torch.device, advance: Advance, padded: bool
    ) -> None:
        self._source, self._config, self._device, self._advance = source, config, device, advance
        self._padded = padded
        self._upload = Uploader(device) if device.type == "cuda" else None
        self.read = 0
        self._dtype = TORCH_DTYPE[DTYPES[config.dtype]]

    def vision(self) -> VisionWeights:
        embeddings = f"{VISION}.embeddings"
        patch = self._wide(f"{embeddings}.patch_embedding.weight").flatten(1)
        bias = self._wide(f"{embeddings}.patch_embedding.bias")
        position = self._sum(self._wide(f"{embeddings}.position_embedding.weight"), bias)
        layers = tuple(self._vision_layer(f"{VISION}.encoder.layers.{i}") for i in range(self._config.vision_layers))
        return VisionWeights(
            patch=self._with_room(patch),
            position=self._cast(self._stacked([position] * len(self._config.views))),
            layers=layers,
            norm=self._dense(f"{VISION}.post_layernorm"),
            projector=self._dense(PROJECTOR),
        )

    def _vision_layer(self, layer: str) -> VisionLayer:
        qkv = [f"{layer}.self_attn.{part}_proj" for part in "qkv"]
        return VisionLayer(
            norm1=self._dense(f"{layer}.layer_norm1"),
            qkv=self._dense(*qkv),
            output=self._dense(f"{layer}.self_attn.out_proj"),
            norm2=self._dense(f"{layer}.layer_norm2"),
            up=self._dense(f"{layer}.mlp.fc1", place=self._with_room),
            down=self._dense(f"{layer}.mlp.fc2", place=self._with_room),
        )

    def prefix(self) -> PrefixWeights:
        last = f"{LANGUAGE}.layers.{self._config.layers - 1}"
        key_value = self._wide(f"{last}.self_attn.k_proj.weight", f"{last}.self_attn.v_proj.weight")
        return PrefixWeights(
            embedding=self._cast(self._stored(EMBEDDING)),
            layers=tuple(self._prefix_layer(f"{LANGUAGE}.layers.{i}") for i in range(self._config.layers - 1)),
            last_key_value=self._cast(self._scaled(key_value, self._norm_weight(f"{last}.input_layernorm"))),
        )

    def _prefix_layer(self, layer: str) -> GemmaLayer:
        return self._gemma_layer(
            layer, self._norm_weight(f"{layer}.input_layernorm"), self._norm_weight(f"{layer}.post_attention_layernorm")
        )

    def expert(self) -> ExpertWeights:
        step = -1.0 / self._config.steps
        leave = [self._scaled(self._wide(f"action_out_proj.{name}"), step) for name in ("weight", "bias")]
        return ExpertWeights(
            enter=Dense(self._wide("action_in_proj.weight"), self._wide("action_in_proj.bias")),
            layers=tuple(self._gemma_layer(f"{EXPERT}.layers.{i}") for i in range(self._config.layers)),
            leave=Dense(*leave),
        )

    def _gemma_layer(self, layer: str, norm1: Tensor | float = 1.0, norm2: Tensor | float = 1.0) -> GemmaLayer:
        qkv = self._wide(*(f"{layer}.self_attn.{part}_proj.weight" for part in "qkv"))
        gate_up = self._wide(f"{layer}.mlp.gate_proj.weight", f"{layer}.mlp.up_proj.weight")
        return GemmaLayer(
            qkv=self._cast(self._scaled(qkv, norm1)),
            output=self._cast(self._stored(f"{layer}.self_attn.o_proj.weight")),
            gate_up=self._cast(self._scaled(gate_up, norm2)),
            down=self._cast(self._stored(f"{layer}.mlp.down_proj.weight")),
        )

    def time(self) -> TimeWeights:
        def wide(name: str) -> Dense:
            return Dense(self._wide(f"{name}.weight"), self._wide(f"{name}.bias"))

        def stored(name: str) -> Dense:
            return Dense(self._stored(f"{name}.weight"), self._stored(f"{name}.bias"))

        return TimeWeights(
            times=time_embeddings(self._config).to(self._device),
            first=wide("time_mlp_in"),
            second=wide("time_mlp_out"),
            modulations=tuple(stored(name) for name in modulation_names(self._config)),
        )

    def _dense(self, *names: str, place: Callable[[Tensor], Tensor] | None = None) -> Dense:
        weight = self._wide(*(f"{name}.weight" for name in names))
        bias = self._wide(*(f"{name}.bias" for name in names))
        return Dense((place or self._cast)(weight), self._cast(bias))

    def _norm_weight(self, name: str) -> Tensor:
        return self._sum(self._wide(f"{name}.weight"), 1.0)

    def _wide(self, *names: str) -> Tensor:
        """The tensors, one above the other, in float32 on the device."""
        tensors = [self._stored(name).float() for name in names]
        return tensors[0] if len(tensors) == 1 else self._stacked(tensors)

    def _stored(self, name: str) -> Tensor:
        stored = self._source.tensor(name)
        tensor = self._moved(stored)
        self.read += stored.nbytes
        self._advance(stored.nbytes)
        return tensor

    def _moved(self, stored: Tensor) -> Tensor:
        if self._upload is None or stored.device.type != "cpu":
            return stored.to(self._device)
        return self._upload(stored)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype).contiguous()

    def _with_room(self, matrix: Tensor) -> Tensor:
        """One of the matrices that fused stages multiply with padding, see `load_weights`."""
        shape = padded_shape(matrix.shape)
        if self._padded and matrix.shape != shape:
            return in_padded_memory(matrix, shape, self._dtype)
        return self._cast(matrix)

    # All arithmetic of the loader.

    def _stacked(self, tensors: list[Tensor]) -> Tensor:
        return torch.cat(tensors)

    def _scaled(self, tensor: Tensor, factor: Tensor | float) -> Tensor:
        return tensor * factor

    def _sum(self, tensor: Tensor, other: Tensor | float) -> Tensor:
        return tensor + other


class _ShapeLoader(_Loader):
    """Shapes without values, on the meta device. PyTorch's arithmetic there is Python that imports its whole compiler,
    which takes a second or more of a start; shapes need none."""

    def _stacked(self, tensors: list[Tensor]) -> Tensor:
        return tensors[0].new_empty((sum(len(tensor) for tensor in tensors), *tensors[0].shape[1:]))

    def _scaled(self, tensor: Tensor, factor: Tensor | float) -> Tensor:
        return tensor

    def _sum(self, tensor: Tensor, other: Tensor | float) -> Tensor:
        return tensor
