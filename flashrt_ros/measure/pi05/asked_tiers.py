"""The tiers that are to be timed beside 16-bit, judged before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...engine import resolve_device
from ...engine.devices import free_bytes
from ...policies import PolicyError
from ...policies.pi05 import identify
from ...policies.pi05.config import Pi05Config
from ...policies.pi05.memory import needed_bytes
from ...policies.pi05.tiers import choose_tier, require_gpu
from ...precision.calibration import load_calibration
from ...precision.errors import PrecisionError
from ...precision.tier import load_tier
from ..errors import MeasureError
from .result import WIDE

_OURS = ("precision", "calibration", "unverified")  # settings that the tiers themselves say


@dataclass(frozen=True)
class AskedTier:
    """A tier by its preset's name or its YAML file, and what `flashrt calibrate` wrote for it."""

    precision: str
    calibration: Path

    @property
    def settings(self) -> dict[str, Any]:
        """What makes a policy one of this tier; its gate is not asked, because times need no verdict."""
        return {"precision": self.precision, "calibration": str(self.calibration), "unverified": True}


def tier_settings(
    settings: Mapping[str, Any], asked: Sequence[AskedTier], device: str, *, twice: bool = False
) -> list[dict[str, Any]]:
    """Settings of 16-bit and of every tier, in their order, once it is certain that all of them can be loaded.

    The checkpoint is hashed for this, as a calibration belongs to one.

    Args:
        settings: of the policy, without a precision.
        twice: every policy will run twice (launch overlap off and on).

    Raises:
        MeasureError: a tier that is unknown, named twice or 16-bit, cannot run on this GPU, or has no calibration of
            its own for this very policy, by name; or policies that do not fit into the GPU's memory together.
        PolicyError, DeviceError: settings, checkpoint or device are wrong in themselves.
    """
    said = [name for name in _OURS if settings.get(name)]
    if said:
        raise MeasureError(f"setting '{said[0]}' is for one tier; leave it out where several are named")
    names = _names(asked)
    target = resolve_device(device)
    config, identity = identify(settings)
    configs = [replace(config, **item.settings) for item in asked]
    for name, each in zip(names, configs, strict=True):
        try:
            chosen = choose_tier(each, identity)
            if target.type == "cuda" and config.fused:
                require_gpu(chosen, target)
        except PolicyError as error:
            raise MeasureError(f"tier '{name}': {error}") from None
    if target.type == "cuda":
        require_room({WIDE[config.dtype]: config, **dict(zip(names, configs, strict=True))}, free_bytes(target), twice)
    return [dict(settings), *({**settings, **item.settings} for item in asked)]


def _names(asked: Sequence[AskedTier]) -> list[str]:
    """Names of the tiers, each with a calibration that can be read; nothing but these small files is looked at."""
    names: list[str] = []
    for item in asked:
        try:
            tier = load_tier(item.precision)
            if tier.wide or tier.name in WIDE.values():
                raise MeasureError(f"tier '{tier.name}' is no narrow one; 16-bit is timed in any case")
            if tier.name in names:
                raise MeasureError(f"tier '{tier.name}' is named twice")
            load_calibration(item.calibration.expanduser())
        except PrecisionError as error:
            raise MeasureError(f"tier '{item.precision}': {error}") from None
        names.append(tier.name)
    return names


def require_room(configs: Mapping[str, Pi05Config], free: int, twice: bool) -> None:
    """MeasureError, with what each one takes, unless policies of all of `configs` fit into `free` bytes together."""
    copies = 2 if twice else 1
    takes = {name: copies * needed_bytes(config) for name, config in configs.items()}
    if sum(takes.values()) > free:
        each = ", ".join(f"{name} {_gib(nbytes)}" for name, nbytes in takes.items())
        twins = "; each runs twice, for the pair of launch overlap" if twice else ""
        remedy = "name fewer tiers, or leave --mechanisms out" if twice else "name fewer tiers"
        total = _gib(sum(takes.values()))
        raise MeasureError(f"together these take up to {total} ({each}{twins}), and {_gib(free)} are free; {remedy}")


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"
