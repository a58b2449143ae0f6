"""Calibrating a tier of π0.5: two passes over the observations, in the wide precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...policies.pi05.sites import foldable_sites, site_matrices
from ...policies.pi05.tiers import tier_key, weight_bytes
from ...policies.progress import progress
from ...precision.calibrating import HEADROOM, PERCENTILE, calibrate, choose_multipliers
from ...precision.calibration import Calibration
from ...precision.errors import CalibrationError
from ...precision.tier import Tier
from ..circumstances import machine, now, versions
from ..tables import table
from .observations import Observation
from .watched import Watched

_SHOWN = 8  # worst sites in each table


def calibrate_tier(
    watched: Watched,
    tier: Tier,
    observations: Sequence[Observation],
    *,
    source: str,
    percentile: float = PERCENTILE,
    headroom: float = HEADROOM,
) -> Calibration:
    """Scales for every narrow site of `tier`. The first pass decides multipliers, the second counts what they leave.

    Args:
        source: where the observations come from, for the record.

    Raises:
        CalibrationError: the tier is 16-bit, or a site's input is not finite or never moves.
    """
    policy, observer = watched.policy, watched.observer
    if tier.wide:
        raise CalibrationError("a 16-bit tier has nothing to calibrate")
    key = tier_key(policy.config, tier, policy.contract.identity)
    with progress(f"calibrating {tier.name}", 2 * len(observations), "observations") as advance:
        watched.watch(observations, advance)
        weights = {site: matrix for site, matrix in site_matrices(policy.weights).items() if site in observer.ranges}
        foldable = foldable_sites(policy.config)
        with torch.inference_mode():
            choices = choose_multipliers(observer, weights, key.formats, foldable)
        observer.multipliers = {s: c.multiplier for s, c in choices.items() if c.multiplier is not None}
        watched.watch(observations, advance)
    protocol = {
        "tier": tier.name, "source": source, "observations": len(observations), "checkpoint": policy.checkpoint,
        "device": policy.contract.identity.architecture, "date": now(), "machine": machine(), "versions": versions(),
    }  # fmt: skip
    return calibrate(observer, choices, key, percentile=percentile, headroom=headroom, protocol=protocol)


def summary(calibration: Calibration, watched: Watched) -> str:
    """The worst sites, and how many bytes the weights will take."""
    reports = calibration.reports
    size = weight_bytes(watched.policy.weights, calibration.contract.formats)
    clipped = sum(report.saturated > 0 for report in reports.values())

    def worst(name: str) -> list[str]:
        return sorted(reports, key=lambda site: -getattr(reports[site], name))[:_SHOWN]

    formats = {item.name: f"{item.weight} x {item.activation}" for item in calibration.contract.formats}
    errors = [(site, formats[site], reports[site].error, reports[site].strength) for site in worst("error")]
    outliers = [
        (site, reports[site].outlier, reports[site].largest, reports[site].saturated, reports[site].lost)
        for site in worst("outlier")
    ]
    return "\n\n".join(
        (
            table(("largest error of a product", "weight x input", "relative", "strength"), errors),
            table(("furthest outliers", "largest / p99.9", "largest", "saturated", "lost"), outliers),
            f"{clipped} of {len(reports)} sites saturate on these observations\n"
            f"weights: {size.stored / 1e6:.1f} MB, {size.ratio:.3f} of {size.wide / 1e6:.1f} MB in 16 bits",
        )
    )


def describe(calibration: Calibration) -> Mapping[str, Any]:
    """What a report says of a calibration."""
    return {"digest": calibration.digest, **calibration.protocol}
