"""Several linear layers that read the same tensor (query, key, value) as one product."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..patches import Call
from ..structure import Match, Plain, Scene, Site
from .mlp import packed


class PackedLinears(Plain):
    """Linear layers that the examples always called one after the other on the very same tensor.

    The first one computes the product of all of them; the others find their part of it if they are called with that
    tensor, unchanged, in the same thread, and compute their own product otherwise.
    """

    name = "packed_linears"
    kind = "packing"

    def find(self, scene: Scene) -> Iterable[Match]:
        """Groups whose weights can be stacked."""
        for group in scene.shared:
            layers = [site.module for site in group]
            if not any(scene.hooks_below(site) for site in group) and _stackable(layers):
                yield Match(group, partial(_build, group), tuple(layers), f"{len(group)} products in one")


def _stackable(layers: Sequence[nn.Module]) -> bool:
    kinds = {
        (type(layer), layer.in_features, layer.bias is None, layer.weight.dtype, layer.weight.device)
        for layer in layers
        if isinstance(layer, nn.Linear)
    }
    return len(kinds) == 1 and next(iter(kinds))[0] is nn.Linear and len(set(map(id, layers))) == len(layers)


@dataclass
class _Product:
    """The parts of the last product, and the tensor that it was made of."""

    x: Tensor
    version: int
    parts: dict[int, Tensor]


def _build(group: tuple[Site, ...]) -> Sequence[Call]:
    layers = [site.module for site in group if isinstance(site.module, nn.Linear)]
    weight, bias = packed(layers)
    widths = [layer.out_features for layer in layers]
    local = threading.local()

    def first(x: Tensor) -> Tensor:
        parts = torch.split(F.linear(x, weight, bias), widths, dim=-1)
        local.last = _Product(x, _version(x), dict(enumerate(parts[1:], start=1)))
        return parts[0]

    def later(index: int, x: Tensor) -> Tensor:
        last: _Product | None = getattr(local, "last", None)
        if last is None or last.x is not x or last.version != _version(x) or index not in last.parts:
            return F.linear(x, layers[index].weight, layers[index].bias)
        part: Tensor = last.parts.pop(index)
        if not last.parts:
            local.last = None  # nothing of the call may outlive it
        return part

    return (first, *(partial(later, index) for index in range(1, len(layers))))


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


STRUCTURES = (PackedLinears(),)
