"""Latency against agreement: the points of a result file, and the picture of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from .errors import MeasureError

COSINE, ERROR = "cosine", "error"
METRICS = (COSINE, ERROR)
_SMALLEST = 1e-9  # cosines are kept with nine digits; what is nearer is drawn here
_LABELS = {COSINE: "1 − cosine with float32 (tick: worst observation)", ERROR: "relative error against float32"}
_COLOURS = {"16-bit": "#33415c", "32-bit": "#33415c", "8-bit": "#2a7f9e", "4-bit-expert": "#c8702a", "4-bit": "#b03a48"}
_OTHERS = ("#5b8c3a", "#7d5ba6", "#8c6d1f", "#c2578f")  # tiers of a user's own
_GREY = "#8a8f98"
_FAR = 2.5  # factor between the slowest and the fastest mark from which on the axis is logarithmic
_ROOM = 0.18  # beside the outermost marks, for labels, as a share of their distance
_LABEL_SIZE = 0.16, 0.05  # width and half the height of a label, as shares of the axes
_LEROBOT = "lerobot"  # how the baselines begin that are the official bfloat16 model


@dataclass(frozen=True)
class Point:
    """One result with agreement.

    Attributes:
        ms: replay, p50.
        distance, worst: of all actions together and of the worst observation (None: not known), in the metric's unit.
        passed: False if its fidelity gate or its parity failed.
    """

    label: str
    tier: str
    ms: float
    distance: float
    worst: float | None
    passed: bool


@dataclass(frozen=True)
class Panel:
    """All results of one configuration.

    Attributes:
        together: whether all points were timed in the same interleaved rounds.
        official: distance of LeRobot's own bfloat16, None if it was not measured.
        baselines: milliseconds by name.
    """

    title: str
    points: Sequence[Point]
    together: bool
    official: float | None
    baselines: Mapping[str, float]


def panels(results: Sequence[Mapping[str, Any]], metric: str, say: Callable[[str], None]) -> list[Panel]:
    """The points of a result file by configuration; a result without agreement is told to `say` and left out.

    Raises MeasureError if no result has an agreement, or one lacks what every result has.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    try:
        for result in results:
            groups.setdefault(_title(result), []).append(result)
        found = [_panel(title, group, metric, say) for title, group in groups.items()]
    except (KeyError, TypeError, AttributeError) as error:
        raise MeasureError(f"this is no result of `flashrt bench`: {type(error).__name__} {error}") from None
    drawn = [panel for panel in found if panel.points]
    if not drawn:
        raise MeasureError(
            "no result here has an agreement: give `flashrt bench` what `flashrt verify` wrote (--parity), and gate "
            "each tier with `flashrt verify --tier` before it is timed"
        )
    return drawn


def _title(result: Mapping[str, Any]) -> str:
    where = result["machine"].get("gpu") if result["device"] != "cpu" else result["machine"]["cpu"]
    sizes = f"{result['views']} views, {result['tokens']} tokens, chunk {result['chunk']}"
    return f"{result['preset']} on {where}: {sizes}"


def _panel(title: str, group: Sequence[Mapping[str, Any]], metric: str, say: Callable[[str], None]) -> Panel:
    plans = {result["plan"] for result in group}
    points: list[Point] = []
    shown: list[Mapping[str, Any]] = []
    official: float | None = None
    baselines: dict[str, float] = {}
    for result in group:
        label = result["tier"] if len(plans) == 1 else f"{result['tier']} ({result['plan']})"
        point = _point(result, label, metric)
        if point is None:
            say(f"left out: {label}, {title}: its agreement was not measured, or is no number")
        else:
            points.append(point)
            shown.append(result)
        official = _official(result, metric) if official is None else official
        baselines |= result["baselines"]
    return Panel(title, points, _together(shown), official, baselines)


def _together(results: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all were timed in one interleaved run, of which they may be a part."""
    runs = {(result["date"], tuple(result.get("interleaved", ()))) for result in results}
    return len(runs) == 1 and {result["tier"] for result in results} <= set(next(iter(runs))[1])


def _point(result: Mapping[str, Any], label: str, metric: str) -> Point | None:
    found = result.get("agreement") or result.get("parity")
    if not found:
        return None
    distance, worst = _distance(found, metric), 1 - found["cosine_worst"] if metric == COSINE else None
    if distance is None or not math.isfinite(distance):
        return None
    passed = found["passed"] if "passed" in found else not found["failures"]
    return Point(label, result["tier"], float(result["replay_ms"]["p50"]), distance, worst, bool(passed))


def _distance(found: Mapping[str, Any], metric: str) -> float | None:
    value = found["relative_error"] if metric == ERROR else 1 - found["cosine_global"]
    return None if value is None else float(value)


def _official(result: Mapping[str, Any], metric: str) -> float | None:
    parity = result.get("parity")
    if not parity:
        return None
    error, similar = parity["official_bf16_relative_error"], parity["official_bf16_cosine_global"]
    return float(error) if metric == ERROR else 1 - float(similar)


# -- picture -----------------------------------------------------------------------------------------------------------


def draw(found: Sequence[Panel], metric: str, path: Path, *, linear: bool = False) -> None:
    """Write one panel beneath the other; nearer to the lower left is better.

    Args:
        linear: latency on a linear axis; by default it is logarithmic where the marks lie far apart.

    Raises MeasureError if matplotlib is not installed, or cannot write a file of that name.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise MeasureError("the picture needs matplotlib; it comes with `pip install 'flashrt_ros[demo]'`") from None
    others = {point.tier for panel in found for point in panel.points} - set(_COLOURS)
    colours = _COLOURS | dict(zip(sorted(others), cycle(_OTHERS), strict=False))
    figure = Figure(figsize=(9, 5.2 * len(found)), layout="constrained")
    for axes, panel in zip(figure.subplots(len(found), squeeze=False)[:, 0], found, strict=True):
        _draw(axes, panel, metric, colours, linear)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(path, dpi=150)
    except (ValueError, OSError) as error:
        raise MeasureError(f"cannot write the picture '{path}': {error}") from None


def _draw(axes: Any, panel: Panel, metric: str, colours: Mapping[str, str], linear: bool) -> None:
    marks = [*(point.ms for point in panel.points), *panel.baselines.values()]
    log = not linear and max(marks) > _FAR * min(marks)
    _scale(axes, panel, marks, log)
    _draw_references(axes, panel)
    for point in panel.points:
        others = [other for other in panel.points if other is not point]
        _draw_point(axes, point, colours[point.tier], on_left=_better_on_left(axes, point, others))
    runs = "timed in the same interleaved rounds" if panel.together else "timed in separate runs"
    runs = f"nearer to the lower left is better{f'; {runs}' if len(panel.points) > 1 else ''}"
    axes.set_title(panel.title, loc="left", fontsize=11, pad=22)
    axes.text(0, 1.02, runs, transform=axes.transAxes, fontsize=9, color=_GREY)
    axes.set_xlabel(f"latency: replay, p50 (ms{', logarithmic' if log else ''})")
    axes.set_ylabel(_LABELS[metric])
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, which="major", color="#e6e8eb", linewidth=0.8)
    axes.set_axisbelow(True)


def _scale(axes: Any, panel: Panel, marks: Sequence[float], log: bool) -> None:
    """Axes around all marks, with room for their labels."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = min(marks), max(marks)
    if log:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda ms, _: f"{ms:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        room = (high / low) ** _ROOM
        axes.set_xlim(low / room, high * room)
    else:
        room = _ROOM * (high - low) or 0.2 * high
        axes.set_xlim(low - room, high + room)
    heights = [max(value, _SMALLEST) for value in _heights(panel)]
    axes.set_yscale("log")
    axes.set_ylim(min(heights) / 3, max(heights) * 4)


def _heights(panel: Panel) -> list[float]:
    values = [point.distance for point in panel.points]
    values += [point.worst for point in panel.points if point.worst is not None]
    return values if panel.official is None else [*values, panel.official]


def _draw_references(axes: Any, panel: Panel) -> None:
    """The official bfloat16 model's distance and each baseline's latency as lines, marked where both are one model."""
    line = {"color": _GREY, "linewidth": 1, "zorder": 1}
    text = {"color": _GREY, "fontsize": 8, "textcoords": "offset points"}
    if panel.official is not None:
        height = max(panel.official, _SMALLEST)
        axes.axhline(height, linestyle="--", **line)
        place = {"xy": (1, height), "xycoords": ("axes fraction", "data"), "xytext": (-2, 9), "ha": "right"}
        over_lines = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.annotate("LeRobot's own bfloat16", bbox=over_lines, **place, **text)
    for name, ms in panel.baselines.items():
        axes.axvline(ms, linestyle=":", **line)
        place = {"xy": (ms, 0), "xycoords": ("data", "axes fraction"), "xytext": (-4, 5), "ha": "right", "va": "bottom"}
        axes.annotate(f"{name.replace('_', ' ')}, {ms:.3g} ms", rotation=90, **place, **text)
        if panel.official is not None and name.startswith(_LEROBOT):
            axes.plot(ms, max(panel.official, _SMALLEST), "D", markerfacecolor="white", markeredgecolor=_GREY, zorder=2)


def _better_on_left(axes: Any, point: Point, others: Sequence[Point]) -> bool:
    """Whether fewer marks stand in the way of a label on the left than of one on the right."""
    width, half = _LABEL_SIZE
    x, y = _in_axes(axes, point.ms, point.distance)
    left = right = 0
    for other in others:
        beside, low = _in_axes(axes, other.ms, other.distance)
        high = _in_axes(axes, other.ms, other.distance if other.worst is None else other.worst)[1]
        if low - half < y < high + half:
            left += x - width < beside <= x
            right += x < beside < x + width
    return left < right


def _in_axes(axes: Any, ms: float, distance: float) -> tuple[float, float]:
    """A place as shares of the axes' width and height."""
    x, y = axes.transAxes.inverted().transform(axes.transData.transform((ms, max(distance, _SMALLEST))))
    return float(x), float(y)


def _draw_point(axes: Any, point: Point, colour: str, *, on_left: bool) -> None:
    height = max(point.distance, _SMALLEST)
    if point.worst is not None:
        worst = max(point.worst, _SMALLEST)
        axes.plot([point.ms, point.ms], [height, worst], color=colour, linewidth=1.5, zorder=3)
        axes.plot(point.ms, worst, "_", color=colour, markersize=9, markeredgewidth=1.5, zorder=3)
    face = colour if point.passed else "white"
    axes.plot(point.ms, height, "o", markersize=9, markerfacecolor=face, markeredgecolor=colour, mew=1.5, zorder=4)
    verdict = "" if point.passed else "\nbelow its bar"
    axes.annotate(
        f"{point.label}\n{point.ms:.4g} ms{verdict}", (point.ms, height), xytext=(-9 if on_left else 9, -3),
        textcoords="offset points", color=colour, fontsize=10, ha="right" if on_left else "left", va="center",
        linespacing=1.15, zorder=5,
    )  # fmt: skip
