"""From what an observer saw to a calibration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..contract import WIDE, Contract, SiteFormat
from . import e2m1, e4m3
from .calibration import Calibration, SiteReport, SiteScale
from .errors import CalibrationError
from .observe import Histogram, Observer
from .smoothing import Choice, choose, input_scale, rounded

PERCENTILE = 100.0
HEADROOM = 2.0
"""Scales leave room for inputs twice as large as calibration saw. In a floating-point format that costs no precision:
every value only moves by one exponent, of which E4M3 has sixteen."""

_OUTLIER = 99.9  # percentile that the largest value is compared with


def choose_multipliers(
    observer: Observer, weights: Mapping[str, Tensor], formats: tuple[SiteFormat, ...], foldable: frozenset[str]
) -> dict[str, Choice]:
    """The best scaling of every site that is multiplied, after the first pass.

    Args:
        weights: matrices by site, as the wide policy has them.
        foldable: sites behind a norm that can take a multiplier.

    Raises:
        CalibrationError: a site whose input never moved, or was never reached.
    """
    choices: dict[str, Choice] = {}
    for table in formats:
        if table.name in weights:
            seen = observer.check(table.name)
            choices[table.name] = choose(
                seen.sample, seen.mean, weights[table.name], table, foldable=table.name in foldable
            )
        elif table.activation != WIDE:  # multiplied, but not with a weight
            choices[table.name] = rounded(observer.check(table.name).sample)
    return choices


def calibrate(
    observer: Observer,
    choices: Mapping[str, Choice],
    key: Contract,
    *,
    percentile: float = PERCENTILE,
    headroom: float = HEADROOM,
    protocol: Mapping[str, Any],
) -> Calibration:
    """Scales for every site of `key`, after the second pass.

    Args:
        percentile: of the magnitudes, in per cent, that shall fit below the largest code / headroom.

    Raises:
        CalibrationError: a percentile or headroom that makes no sense.
    """
    if not 50 <= percentile <= 100:
        raise CalibrationError(f"percentile is {percentile}, expected 50 to 100")
    if not 1 <= headroom <= 64:
        raise CalibrationError(f"headroom is {headroom}, expected 1 to 64")
    scales: dict[str, SiteScale] = {}
    reports: dict[str, SiteReport] = {}
    for table in key.formats:
        choice = choices.get(table.name)
        if choice is None:  # looked up, not multiplied
            scales[table.name] = SiteScale(None)
            continue
        histogram = observer.histograms[table.name]
        scale = _scale(histogram, table, percentile, headroom)
        scales[table.name] = SiteScale(scale, choice.multiplier)
        rows = observer.ranges[table.name].rows
        reports[table.name] = _report(histogram, table, scale, choice, rows)
    return Calibration(key, scales, reports, {"percentile": percentile, "headroom": headroom, **protocol})


def _scale(histogram: Histogram, table: SiteFormat, percentile: float, headroom: float) -> float | None:
    if table.activation == WIDE:
        return None
    value = histogram.percentile(percentile) * headroom
    return float(input_scale(torch.tensor(value), table.activation))


def _report(histogram: Histogram, table: SiteFormat, scale: float | None, choice: Choice, rows: int) -> SiteReport:
    usual = histogram.percentile(_OUTLIER)
    saturated = lost = 0.0
    if scale is not None:
        # Of NVFP4, the largest block scale limits; what a block loses depends on its neighbours and is not counted.
        top = e4m3.LARGEST * (e2m1.LARGEST if table.activation == "nvfp4" else 1.0)
        saturated = histogram.share_above(scale * top * (1 - 1e-6))  # a hair less, as the scale itself is rounded
        lost = histogram.share_lost(scale * e4m3.SMALLEST / 2) if table.activation == "e4m3" else 0.0
    return SiteReport(
        rows=rows,
        largest=histogram.largest,
        outlier=histogram.largest / usual if usual > 0 else float(histogram.largest > 0),
        saturated=saturated,
        lost=lost,
        strength=choice.strength,
        error=choice.error,
    )
