"""What a CUDA graph cannot capture, forbidden on the CPU too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal")


class CaptureSafe(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within the block, an op that needs the host to wait for a value, or whose shape depends on data, is an error."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in _FORBIDDEN or name.startswith("unique"):
            raise AssertionError(f"aten.{name} cannot be captured")
        return func(*args, **(kwargs or {}))


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """N(0, 1) from `seed`."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
