"""How much memory a configuration takes on a GPU, known before anything is loaded."""

from __future__ import annotations

import torch
from torch import Tensor

from ...contract import Identity
from ...engine import arena_offsets
from .config import Pi05Config
from .cuda_expert import packed_expert_bytes
from .layout import expected_shapes
from .plan import build_contract
from .sites import EMBEDDING_SITE, site_matrices
from .tiers import formats_of, weight_bytes
from .weights import load_weights

_LIBRARIES = 1 << 30  # for CUDA's context, cuBLAS, cuDNN, what graphs keep between kernels, and a few MB of padding
_COPIES = 4  # in float32, of one matrix at a time, that packing and the references of a tier make


def needed_bytes(config: Pi05Config) -> int:
    """The most that is taken at one time, at a tier's true bytes, with what libraries take.

    That is the weights, the expert's packed copy where its kernel has one (codes as codes), and every buffer of the
    contract; or, in a tier, the 16-bit weights beside the packed ones, while these are made.

    Raises:
        SettingsError: the tier does not exist.
    """
    weights, formats = load_weights(_Shapes(config), config, torch.device("meta")), formats_of(config)
    stored = weight_bytes(weights, formats).stored
    matrices = site_matrices(weights)
    narrow = {item.name for item in formats}
    copied = packed_expert_bytes(matrices, formats, config.layers) if config.fused else 0
    _, arena = arena_offsets(build_contract(config, Identity(policy="pi05", weights="")))
    running, packing = stored + copied + arena, 0
    if narrow:
        packing = weight_bytes(weights).stored + stored
    multiplied = [matrices[site].numel() for site in narrow & set(matrices) if site != EMBEDDING_SITE]
    return max(running, packing) + 4 * _COPIES * max(multiplied, default=0) + _LIBRARIES


class _Shapes:
    """A checkpoint of this configuration without its values."""

    def __init__(self, config: Pi05Config) -> None:
        self._shapes = expected_shapes(config)
        self.nbytes = 0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._shapes)

    def tensor(self, name: str) -> Tensor:
        return torch.empty(self._shapes[name], device="meta", dtype=torch.bfloat16)
