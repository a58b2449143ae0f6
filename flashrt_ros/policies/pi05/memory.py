"""How much memory a configuration takes on a GPU, known before anything is loaded."""

from __future__ import annotations

import math

import torch

from ...contract import Identity
from ...engine import arena_offsets
from ...engine.dtypes import TORCH_DTYPE
from .config import DTYPES, Pi05Config
from .layout import EXPERT, expected_shapes
from .plan import build_contract

_LIBRARIES = 1 << 30  # an allowance for CUDA's context, cuBLAS, cuDNN, and what graphs keep between kernels


def needed_bytes(config: Pi05Config) -> int:
    """Weights, the expert's packed copy where it is fused, every buffer of the contract, and what libraries take."""
    size = _itemsize(config)
    counts = {name: math.prod(shape) for name, shape in expected_shapes(config).items()}
    packed = sum(count for name, count in counts.items() if name.startswith(EXPERT)) if config.fused else 0
    _, arena = arena_offsets(build_contract(config, Identity(policy="pi05", weights="")))
    return (sum(counts.values()) + packed) * size + arena + _LIBRARIES


def _itemsize(config: Pi05Config) -> int:
    return torch.empty((), dtype=TORCH_DTYPE[DTYPES[config.dtype]]).element_size()
