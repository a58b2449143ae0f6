"""The least time that a stage can take: its operations and its bytes against a device's ceilings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .devices import Device

TIERS = ("16-bit", "8-bit", "4-bit")
_WEIGHT_BITS = {"bf16": 16.0, "fp8": 8.0, "fp4": 4.5}  # 4-bit formats carry an 8-bit scale for every 16 weights


def counted_as(tier: str, device: Device) -> str | None:
    """Whose floor holds for a tier, of TIERS; None for one that has none.

    "4-bit-expert" is what "4-bit" counts where there is no 4-bit arithmetic: four bits for the expert, eight elsewhere.
    """
    if tier == "4-bit-expert" and device.best("fp4") != "fp4":
        return "4-bit"
    return tier if tier in TIERS else None


@dataclass(frozen=True)
class Work:
    """What one stage must do in one decision.

    Attributes:
        operations: multiplications and additions of its matrix products.
        weights: weight values read, counted as often as they must be read from memory.
        bytes: other bytes that must be read or written, from the contract's buffers.
        narrowed: whether the 4-bit tier narrows it where the device has no 4-bit arithmetic: weights alone, which pays
            where memory is the limit.
    """

    operations: float
    weights: float
    bytes: float
    narrowed: bool = False


@dataclass(frozen=True)
class Floor:
    """Milliseconds of one stage at a device's ceilings; the larger one is the floor."""

    compute_ms: float
    memory_ms: float
    format: str

    @property
    def ms(self) -> float:
        """The least time."""
        return max(self.compute_ms, self.memory_ms)

    @property
    def bound(self) -> str:
        """Which ceiling it meets."""
        return "compute" if self.compute_ms >= self.memory_ms else "memory"


def floor_of(work: Work, device: Device, tier: str) -> Floor:
    """The floor of one stage in one precision tier."""
    wanted = {"16-bit": "bf16", "8-bit": "fp8", "4-bit": "fp4"}[tier]
    compute = device.best(wanted)
    stored = wanted if wanted != "fp4" or compute == "fp4" or work.narrowed else "fp8"
    nbytes = work.weights * _WEIGHT_BITS[stored] / 8 + work.bytes
    return Floor(work.operations / device.compute[compute] / 1e9, nbytes / device.memory / 1e9, compute)


def floors(stages: Mapping[str, Work], device: Device, tier: str) -> dict[str, Floor]:
    """The floor of every stage."""
    return {name: floor_of(work, device, tier) for name, work in stages.items()}


def fractions(stage_ms: Mapping[str, float], least: Mapping[str, Floor]) -> dict[str, float]:
    """Floor / measured time of every stage: 1 is the limit of the hardware."""
    return {name: round(least[name].ms / ms, 4) for name, ms in stage_ms.items() if ms > 0}
