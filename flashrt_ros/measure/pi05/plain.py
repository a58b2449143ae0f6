"""π0.5 in plain PyTorch: what a good programmer writes without kernels of their own.

It is the baseline that "one CUDA graph" and "compiled a layer" are measured on, so it is written to be fast: packed
projections, folded norms, all tables of the time steps made beforehand, attention over exact lengths without a mask,
everything in the weights' dtype. It starts from images that are already resized and normalised on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ...contract import Variant
from ...ops import reference_ops
from ...ops.pixels import pixels_to_patches
from ...policies.pi05.config import Pi05Config
from ...policies.pi05.plan import build_contract
from ...policies.pi05.stages import Pi05Stages
from ...policies.pi05.weights import GemmaLayer, Pi05Weights, VisionLayer
from ...policies.pixels import PixelOrder
from .observations import Observation


@dataclass(frozen=True)
class PlainInputs:
    """patches [views, patches, values], tokens int64[length], noise float32[chunk, padded width]."""

    patches: Tensor
    tokens: Tensor
    noise: Tensor


def vision_layer(x: Tensor, layer: VisionLayer, heads: int, eps: float) -> Tensor:
    """One layer of the vision encoder; x is float[views, patches, width]."""
    views, rows, width = x.shape
    normed = F.layer_norm(x, (width,), layer.norm1.weight, layer.norm1.bias, eps)
    qkv = F.linear(normed, layer.qkv.weight, layer.qkv.bias).view(views, rows, 3, heads, width // heads)
    query, key, value = qkv.permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(x.shape)
    x = x + F.linear(mixed, layer.output.weight, layer.output.bias)
    normed = F.layer_norm(x, (width,), layer.norm2.weight, layer.norm2.bias, eps)
    hidden = F.gelu(F.linear(normed, layer.up.weight, layer.up.bias), approximate="tanh")
    return x + F.linear(hidden, layer.down.weight, layer.down.bias)


def prefix_layer(x: Tensor, layer: GemmaLayer, rope: Tensor, heads: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """One layer of the prefix encoder; x is float[rows, width]. Returns x, keys and values [heads, rows, head_dim]."""
    normed = F.rms_norm(x, (x.shape[-1],), eps=eps)
    query, key, value = _split(F.linear(normed, layer.qkv), rope, heads)
    x = x + F.linear(_attend(query, key, value), layer.output)
    normed = F.rms_norm(x, (x.shape[-1],), eps=eps)
    return x + _feed_forward(normed, layer), key, value


def last_key_value(x: Tensor, weight: Tensor, rope: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Keys and values of the last prefix layer, which is followed no further."""
    return _split(F.linear(F.rms_norm(x, (x.shape[-1],), eps=eps), weight), rope, 0)[1:]


def expert_layer(
    x: Tensor, layer: GemmaLayer, key: Tensor, value: Tensor, rope: Tensor, sites: Tensor, heads: int, eps: float
) -> Tensor:
    """One layer of the expert; x is float[chunk, width], `sites` [2, 3, width] its scales, shifts and gates."""
    query, own_key, own_value = _split(F.linear(_modulated(x, sites[0], eps), layer.qkv), rope, heads)
    mixed = _attend(query, torch.cat((key, own_key), 1), torch.cat((value, own_value), 1))
    x = x + sites[0, 2] * F.linear(mixed, layer.output)
    return x + sites[1, 2] * _feed_forward(_modulated(x, sites[1], eps), layer)


def _modulated(x: Tensor, site: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), eps=eps) * (1 + site[0]) + site[1]


def _feed_forward(normed: Tensor, layer: GemmaLayer) -> Tensor:
    gate, up = F.linear(normed, layer.gate_up).chunk(2, dim=-1)
    return F.linear(F.gelu(gate, approximate="tanh") * up, layer.down)


def _split(qkv: Tensor, rope: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys (both rotated) and values, each [heads, rows, head_dim]; `heads` counts the query heads."""
    rows, head_dim = rope.shape
    parts = qkv.view(rows, -1, head_dim)
    key_heads = (parts.shape[1] - heads) // 2
    cos, sin = rope[:, None].chunk(2, dim=-1)
    rotated = parts[:, : heads + key_heads]
    a, b = rotated.chunk(2, dim=-1)
    rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).transpose(0, 1)
    return rotated[:heads], rotated[heads:], parts[:, heads + key_heads :].transpose(0, 1)


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    heads, rows, head_dim = query.shape
    mixed = F.scaled_dot_product_attention(query[None], key[None], value[None], enable_gqa=heads != key.shape[0])
    return mixed[0].transpose(0, 1).reshape(rows, heads * head_dim)


class Plain:
    """The whole model for one prompt length.

    Args:
        compiled: run the three kinds of layers through torch.compile (default mode), each once.
    """

    def __init__(self, config: Pi05Config, weights: Pi05Weights, *, compiled: bool = False) -> None:
        self.config, self.weights = config, weights
        self._dtype = weights.prefix.embedding.dtype
        self._modulation, self._rope = _tables(config, weights)

        def layer(function: Callable[..., Tensor], *constants: object) -> Callable[..., Tensor]:
            bound = partial(function, **dict(zip(("heads", "eps"), constants, strict=True)))
            return torch.compile(bound, dynamic=False) if compiled else bound

        self._vision_layer = layer(vision_layer, config.vision_heads, config.eps)
        self._prefix_layer = layer(prefix_layer, config.query_heads, config.eps)  # type: ignore[arg-type]
        self._expert_layer = layer(expert_layer, config.query_heads, config.eps)

    def inputs(self, observation: Observation, device: torch.device) -> PlainInputs:
        """Resize, normalise and cut the images beforehand."""
        config = self.config
        patches = torch.empty(len(config.views), config.patches, config.patch_values, dtype=self._dtype, device=device)
        for index, pixels in enumerate(observation.images.values()):
            pixel_format = torch.tensor([*pixels.shape, PixelOrder.RGB], dtype=torch.int32, device=device)
            raw = torch.from_numpy(pixels).to(device).flatten()
            pixels_to_patches(raw, pixel_format, patch=config.patch_size, out=patches[index])
        tokens = torch.from_numpy(observation.tokens).to(device, torch.int64)
        return PlainInputs(patches, tokens, torch.from_numpy(observation.noise).to(device))

    def __call__(self, inputs: PlainInputs) -> Tensor:
        """float32[chunk, padded width]: the actions."""
        images = self._encode_views(inputs.patches)
        scale = self.config.language_width**0.5
        prompt = self.weights.prefix.embedding[inputs.tokens] * scale
        return self._denoise(inputs.noise, self._encode_prefix(torch.cat((images, prompt))))

    def _encode_views(self, patches: Tensor) -> Tensor:
        vision = self.weights.vision
        x = F.linear(patches, vision.patch) + vision.position.view(*patches.shape[:2], -1)
        for layer in vision.layers:
            x = self._vision_layer(x, layer)
        normed = F.layer_norm(x, (x.shape[-1],), vision.norm.weight, vision.norm.bias, self.config.eps)
        return F.linear(normed, vision.projector.weight, vision.projector.bias).flatten(0, 1)

    def _encode_prefix(self, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        rope, cache = self._rope[: len(x)], []
        for layer in self.weights.prefix.layers:
            x, key, value = self._prefix_layer(x, layer, rope)
            cache.append((key, value))
        return [*cache, last_key_value(x, self.weights.prefix.last_key_value, rope, self.config.eps)]

    def _denoise(self, actions: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        expert, config = self.weights.expert, self.config
        rows = cache[0][0].shape[1]
        rope = self._rope[rows : rows + config.chunk]
        for sites in self._modulation:
            x = F.linear(actions, expert.enter.weight, expert.enter.bias).to(self._dtype)
            for index, (layer, (key, value)) in enumerate(zip(expert.layers, cache, strict=True)):
                x = self._expert_layer(x, layer, key, value, rope, sites[2 * index : 2 * index + 2])
            last = _modulated(x, sites[-1], config.eps).float()
            actions = actions + F.linear(last, expert.leave.weight, expert.leave.bias)
        return actions


def _tables(config: Pi05Config, weights: Pi05Weights) -> tuple[Tensor, Tensor]:
    """Modulations and rotary rows, by the same code as ours: they are made once, so they are no part of the time."""
    from ...contract import Identity
    from ...engine.dtypes import TORCH_DTYPE

    contract = build_contract(config, Identity(policy="pi05", weights="plain"))
    device, dtype = weights.prefix.embedding.device, weights.prefix.embedding.dtype
    arena = {
        name: torch.empty(contract.buffer(name).shape, dtype=TORCH_DTYPE[contract.buffer(name).dtype], device=device)
        for name in ("modulation", "rope")
    }
    with torch.inference_mode():
        Pi05Stages(config, weights, reference_ops()).checkpoint(arena, Variant("tables"))
    return arena["modulation"].to(dtype), arena["rope"].to(dtype)
