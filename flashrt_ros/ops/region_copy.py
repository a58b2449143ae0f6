"""Choosing how the bytes of a capsule are copied."""

from __future__ import annotations

from ..engine import resolve_device
from ..engine.copier import CopyRegions, copy_with_torch


def region_copy(device: str) -> CopyRegions:
    """One kernel launch for all regions on a GPU, one strided copy a region elsewhere."""
    resolved = resolve_device(device)
    if resolved.type != "cuda":
        return copy_with_torch
    from .cuda.capsule import CapsuleCopy

    return CapsuleCopy(resolved)
