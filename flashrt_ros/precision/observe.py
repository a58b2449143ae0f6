"""Watching what enters each site while a policy runs in its wide precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..ops import OpTable
from .errors import CalibrationError

Heads = tuple[str, str, str]
SAMPLED_ROWS = 128  # kept of each site, to compare candidates on
_SHIFT = 20  # bits of a float32 that a bin drops: eight bins for each power of two
_BINS = 1 << (31 - _SHIFT)


@dataclass
class Ranges:
    """What the first pass learns of one site.

    Attributes:
        largest, total: float32[inputs] and float64[inputs]: largest magnitude of each input, and sum of magnitudes.
        low, high: of all values.
        rows: live rows seen.
        samples: float32[n, inputs] each, at most `SAMPLED_ROWS` rows together.
    """

    largest: Tensor
    total: Tensor
    low: float = float("inf")
    high: float = float("-inf")
    rows: int = 0
    samples: list[Tensor] = field(default_factory=list)

    @property
    def mean(self) -> Tensor:
        """float32[inputs]: mean magnitude of each input."""
        return (self.total / max(1, self.rows)).float()

    @property
    def sample(self) -> Tensor:
        """float32[rows, inputs]: rows from all over the observations."""
        return torch.cat(self.samples)


@dataclass
class Histogram:
    """Magnitudes of one site's input, counted by the leading bits of their float32 patterns: bins of a twelfth at most.

    Attributes:
        counts: int64[bins], the first of which holds the zeros.
        largest: largest magnitude.
    """

    counts: Tensor = field(default_factory=lambda: torch.zeros(_BINS, dtype=torch.int64))
    largest: float = 0.0

    def add(self, x: Tensor) -> None:
        """Count the values of float32[...] in."""
        magnitude = x.abs()
        self.counts += torch.bincount((magnitude.view(torch.int32) >> _SHIFT).flatten(), minlength=_BINS).cpu()
        self.largest = max(self.largest, float(magnitude.max()))

    def percentile(self, percent: float) -> float:
        """The smallest bin edge that `percent` of all values don't exceed; the largest magnitude at 100."""
        if percent >= 100:
            return self.largest
        wanted = percent / 100 * int(self.counts.sum())
        index = int(torch.searchsorted(self.counts.cumsum(0).double(), wanted))
        return min(self.largest, float(_edges()[min(index, _BINS - 1) + 1]))

    def share_above(self, limit: float) -> float:
        """Share of values whose bin lies wholly above `limit`."""
        return self._share(_edges()[:-1] >= limit)

    def share_lost(self, limit: float) -> float:
        """Share of values above zero whose bin lies wholly below `limit`."""
        lost = _edges()[1:] <= limit
        lost[0] = False
        return self._share(lost)

    def _share(self, chosen: Tensor) -> float:
        return float(self.counts[chosen].sum()) / max(1, int(self.counts.sum()))


def _edges() -> Tensor:
    """float32[bins + 1]: where each bin begins; the last is infinite."""
    patterns = torch.arange(_BINS + 1, dtype=torch.int64) << _SHIFT
    return patterns.clamp(max=0x7F800000).to(torch.int32).view(torch.float32)


class Observer:
    """An op table's `linear` that looks at its input on the way, and at the queries, keys and values that it makes.

    Attributes:
        live: rows that count in the calls to come; None for all. Padding must not decide a scale.
        multipliers: site → float32[inputs], set between the passes; histograms are of the input times these.
        ranges, histograms: what was learnt, by site.
    """

    def __init__(self) -> None:
        self._sites: dict[int, str] = {}
        self._calls: Mapping[str, int] = {}
        self._heads: Mapping[str, Heads] = {}
        self._made: tuple[str, Tensor] | None = None
        self.live: int | None = None
        self.multipliers: dict[str, Tensor] | None = None
        self.ranges: dict[str, Ranges] = {}
        self.histograms: dict[str, Histogram] = {}

    def watch(
        self, sites: Mapping[str, Tensor], calls: Mapping[str, int], heads: Mapping[str, Heads] | None = None
    ) -> None:
        """Begin to look.

        Args:
            sites: site → matrix; a call is recognised by the identity of its matrix.
            calls: how often each site will be called, so that samples come from all over the observations.
            heads: site → sites of the queries, keys and values that its product becomes; None for none.
        """
        self._sites = {id(tensor): site for site, tensor in sites.items()}
        self._calls, self._heads = calls, heads or {}

    def ops(self, wide: OpTable) -> OpTable:
        """`wide` with a `linear` and a `split_rope_write` that are watched."""

        def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor, **keywords: object) -> None:
            site = self._sites.get(id(weight))
            if site is not None:
                self._see(site, x)
                self._made = site, out
            wide.linear(x, weight, bias, out=out, **keywords)

        def split_rope_write(
            qkv: Tensor, rope: Tensor, *, query: Tensor | None, key: Tensor, value: Tensor, **keywords: object
        ) -> None:
            wide.split_rope_write(qkv, rope, query=query, key=key, value=value, **keywords)
            if self._made is not None and self._made[1] is qkv and query is not None:
                sites = self._heads.get(self._made[0], ())
                for site, heads in zip(sites, (query, key, value), strict=False):
                    self._see(site, heads.flatten(1))

        return replace(wide, linear=linear, split_rope_write=split_rope_write)

    def _see(self, site: str, x: Tensor) -> None:
        value = (x if self.live is None else x[: self.live]).float()
        if not bool(value.isfinite().all()):
            raise CalibrationError(f"site '{site}': its input is not finite; check the checkpoint and the observations")
        if self.multipliers is None:
            self._range(site, value)
        else:
            multiplier = self.multipliers.get(site)
            histogram = self.histograms.setdefault(site, Histogram())
            histogram.add(value if multiplier is None else value * multiplier)

    def _range(self, site: str, value: Tensor) -> None:
        magnitude = value.abs()
        known = self.ranges.get(site)
        if known is None:
            known = Ranges(magnitude.amax(0), magnitude.double().sum(0))
            self.ranges[site] = known
        else:
            torch.maximum(known.largest, magnitude.amax(0), out=known.largest)
            known.total += magnitude.double().sum(0)
        known.low, known.high = min(known.low, float(value.min())), max(known.high, float(value.max()))
        known.rows += len(value)
        self._sample(site, known, value)

    def _sample(self, site: str, known: Ranges, value: Tensor) -> None:
        taken = sum(map(len, known.samples))
        wanted = min(len(value), max(1, SAMPLED_ROWS // self._calls[site]), SAMPLED_ROWS - taken)
        if wanted > 0:
            rows = torch.arange(wanted, device=value.device) * len(value) // wanted
            known.samples.append(value[rows].clone())

    def check(self, site: str) -> Ranges:
        """The ranges of `site`; CalibrationError if its input never came, or never moved."""
        known = self.ranges.get(site)
        if known is None:
            raise CalibrationError(f"site '{site}' was never reached by the observations; this is a fault, report it")
        if known.low == known.high:
            what = "zero" if known.high == 0 else f"{known.high:.6g}"
            raise CalibrationError(
                f"site '{site}': every value that entered it was {what}, in {known.rows} rows; no scale can be learnt "
                "from that. Record observations with pictures in them, and check the checkpoint"
            )
        return known
