"""What can be wrong with a tier, its calibration or its fidelity. Every message names the site and the remedy."""

from __future__ import annotations


class PrecisionError(ValueError):
    """A tensor cannot be stored or read in the format that was asked for."""


class TierError(PrecisionError):
    """A tier's table is malformed, does not fit the policy, or cannot run on this device."""


class CalibrationError(PrecisionError):
    """A calibration is missing, damaged, of another policy, or was measured on unusable observations."""


class FidelityError(PrecisionError):
    """A tier has not passed its fidelity gate, so it does not start."""
