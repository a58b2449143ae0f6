"""A trace as a picture."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import MeasureError
from .trace import Span

_LABELLED = 0.03  # kernels shorter than this part of the picture get no label
_SHOWN = 34  # characters of a kernel's name


def draw_layers(rows: Mapping[str, Sequence[Span]], path: Path) -> None:
    """Write a PNG with the kernels of each row on a time axis of their own; matrix products stand out.

    Kernels that run beside each other, as those that are launched early do, stand below each other.

    Raises MeasureError if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise MeasureError("the picture needs matplotlib; install it, or leave --png out") from None
    in_lanes = [lanes(spans) for spans in rows.values()]
    heights = [0.7 + 1.7 * (1 + max(row)) for row in in_lanes]
    figure = Figure(figsize=(13, sum(heights)), layout="constrained")
    all_axes = figure.subplots(len(rows), squeeze=False, height_ratios=heights)[:, 0]
    for axes, (name, spans), row in zip(all_axes, rows.items(), in_lanes, strict=True):
        _draw(axes, spans, row)
        axes.set_title(f"{name}: one layer, {len(spans)} kernels", loc="left", fontsize=9)
    axes.set_xlabel("microseconds from the layer's first kernel (blue: matrix products)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)


def _draw(axes: Any, spans: Sequence[Span], in_lanes: Sequence[int]) -> None:
    whole = max(span.end for span in spans) - spans[0].start
    for span, lane in zip(spans, in_lanes, strict=True):
        left = span.start - spans[0].start
        colour = "#3b6fb6" if span.is_gemm else "#d98c3f"
        axes.barh(-lane, span.duration, 1.0, left, color=colour, edgecolor="white", linewidth=0.3)
        if span.duration > _LABELLED * whole:
            text = short_name(span.name)
            axes.text(left + span.duration / 2, -lane, text, ha="center", va="center", rotation=90, fontsize=6)
    axes.set_yticks([])
    axes.set_xlim(0, whole)


def lanes(spans: Sequence[Span]) -> list[int]:
    """For each of `spans`, in the order in which they began, the first lane that is free when it begins."""
    ends: list[float] = []
    found = []
    for span in spans:
        lane = next((lane for lane, end in enumerate(ends) if end <= span.start), len(ends))
        ends[lane : lane + 1] = [span.end]
        found.append(lane)
    return found


def short_name(name: str) -> str:
    """A kernel's name without return type, template arguments and parameters."""
    bare = re.sub(r"<.*", "", name.replace("(anonymous namespace)", "").split("(")[0]).removeprefix("void ")
    return bare.split("::")[-1][:_SHOWN] or name[:_SHOWN]
