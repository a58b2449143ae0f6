"""The picture of a run: `demo_out/report.png`. Imports no ROS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from .recording import ReceivedChunk, Recording
from .scene import CAMERAS

_INK, _MUTED, _FAINT = "#1f2933", "#6b7785", "#e4e7eb"
_COLOURS = ("#0b7a75", "#dd6b20", "#5b4bb3", "#b83280")  # one an instruction
_LATENCY_COLOUR, _AGE_COLOUR, _REPLAY_COLOUR = "#3b6ea5", "#8a6fb0", "#4a5b6c"
_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": _INK,
    "axes.edgecolor": "#b8c0c8",
    "axes.labelcolor": _MUTED,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _FAINT,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
}  # fmt: skip


def write_report(recording: Recording, summary: Mapping[str, Any], path: Path) -> None:
    """Draw a run: chunks over time by joint, what the cameras saw, latency, age and replays.

    Args:
        recording: with at least one chunk and a status.
        summary: of the same run, by `summary.summarise`.
    """
    with rc_context(_STYLE):
        figure = Figure(figsize=(16, 10), dpi=110, facecolor="white")
        upper = GridSpec(
            2, 5, figure, left=0.03, right=0.985, top=0.80, bottom=0.375,
            width_ratios=(1.18, 1, 1, 1, 1), hspace=0.34, wspace=0.22,
        )  # fmt: skip
        lower = GridSpec(1, 3, figure, left=0.045, right=0.985, top=0.285, bottom=0.065, wspace=0.2)
        _draw_heading(figure, recording, summary)
        _draw_frames(figure, upper, recording)
        _draw_joints(figure, upper, recording)
        chunks = recording.chunks
        latency, age, replays = (figure.add_subplot(lower[0, column]) for column in range(3))
        _draw_histogram(latency, [c.latency for c in chunks], "Latency: windows filled → chunk here", _LATENCY_COLOUR)
        _draw_histogram(age, [c.age for c in chunks], "Age: oldest observation → chunk here", _AGE_COLOUR)
        _draw_replays(replays, recording)
        FigureCanvasAgg(figure)
        figure.savefig(path)


# --- Heading


def _draw_heading(figure: Figure, recording: Recording, summary: Mapping[str, Any]) -> None:
    figure.text(0.03, 0.962, "Camera frames and an instruction in, action chunks out", size=19, weight="bold")
    figure.text(0.03, 0.936, _plan_text(recording, summary), size=9.5, color=_MUTED)
    latency, age = summary["latency_ms"], summary["age_ms"]
    figures = (
        (f"{summary['chunks']}", "action chunks"),
        (f"{summary['rate_hz']:.1f} Hz", "chunk rate"),
        (f"{latency['p50']:.0f} / {latency['p99']:.0f} ms", "latency p50 / p99"),
        (f"{age['p50']:.0f} / {age['p99']:.0f} ms", "observation age p50 / p99"),
        (f"{summary['stale_replays']}", "stale replays"),
        (f"{summary['refused']}", "refused inputs and chunks"),
        (f"{summary['bytes_copied_per_frame'] / 1e6:.2f} MB", "copied a frame, once"),
    )
    for index, (value, label) in enumerate(figures):
        left = 0.03 + index * 0.137
        figure.text(left, 0.886, value, size=17, weight="bold")
        figure.text(left, 0.866, label, size=9, color=_MUTED)


def _plan_text(recording: Recording, summary: Mapping[str, Any]) -> str:
    status = recording.status
    if status is None:
        return f"contract {summary['fingerprint'][:16]}…"
    return (
        f"policy {status.policy} ({status.checkpoint}), {status.precision}, on {status.device}  ·  "
        f"contract {summary['fingerprint'][:16]}…  ·  every figure from messages received over DDS"
    )


# --- Cameras


def _draw_frames(figure: Figure, grid: GridSpec, recording: Recording) -> None:
    for row, camera in enumerate(CAMERAS):
        axes = figure.add_subplot(grid[row, 0])
        axes.set_axis_off()
        axes.set_title(f"{camera.view} camera")
        frame = recording.frames.get(camera.view)
        if frame is None:
            axes.text(0.5, 0.5, "no frame received", ha="center", va="center", color=_MUTED)
        else:
            axes.imshow(frame[::2, ::2], interpolation="antialiased")


# --- Joints


def _draw_joints(figure: Figure, grid: GridSpec, recording: Recording) -> None:
    colours = _colours(recording.chunks)
    names = recording.chunks[0].joint_names[:8]
    end = max((chunk.arrival - recording.start) * 1e-9 for chunk in recording.chunks)
    for index, name in enumerate(names):
        axes = figure.add_subplot(grid[index // 4, 1 + index % 4])
        _draw_joint(axes, recording, name, colours)
        axes.set_xlim(0.0, max(end, 0.1))
        if index // 4 == (len(names) - 1) // 4:
            axes.set_xlabel("time (s)")
    _draw_legend(figure, colours)


def _draw_joint(axes: Axes, recording: Recording, name: str, colours: Mapping[str, str]) -> None:
    traces = [_trace(chunk, name, recording.start) for chunk in recording.chunks]
    shades = [colours[chunk.instruction] for chunk in recording.chunks]
    axes.add_collection(LineCollection(traces, colors=shades, linewidths=0.9, alpha=0.42))
    times, positions = _measured(recording, name)
    axes.plot(times, positions, color=_INK, linewidth=1.3)
    values = np.concatenate([trace[:, 1] for trace in traces] + [positions])
    low, high = np.percentile(values, (0.0, 100.0))
    room = 0.08 * max(high - low, 1e-4)
    axes.set_ylim(low - room, high + room)
    axes.set_title(f"{name.removeprefix('panda_')} ({'m' if 'finger' in name else 'rad'})")
    for moment, text in recording.instructions[1:]:
        axes.axvline((moment - recording.start) * 1e-9, color=colours.get(text, _MUTED), linewidth=1.4, linestyle="--")


def _draw_legend(figure: Figure, colours: Mapping[str, str]) -> None:
    handles = [Line2D([], [], color=_INK, linewidth=1.6, label="measured by the robot")]
    for index, (text, colour) in enumerate(colours.items()):
        what = "chunks for" if index == 0 else "instruction changed: chunks for"
        handle = Line2D([], [], color=colour, linewidth=2.4, label=f"{what} “{text}”")
        handle.set_linestyle("--" if index else "-")
        handles.append(handle)
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.222, 0.853), ncols=len(handles), frameon=False,
        fontsize=10, handlelength=2.6, columnspacing=2.2, borderaxespad=0.0,
    )  # fmt: skip


def _colours(chunks: Sequence[ReceivedChunk]) -> dict[str, str]:
    """Instruction → colour, in the order of first use."""
    texts = dict.fromkeys(chunk.instruction for chunk in chunks)
    return {text: _COLOURS[index % len(_COLOURS)] for index, text in enumerate(texts)}


def _trace(chunk: ReceivedChunk, name: str, start: int) -> NDArray[np.float64]:
    """float64[horizon, 2]: when each step is due (s since `start`), and the target of joint `name`."""
    column = chunk.data[:, chunk.joint_names.index(name)]
    times = (chunk.stamp - start + np.arange(len(column)) * chunk.dt) * 1e-9
    return np.stack((times, column.astype(np.float64)), axis=1)


def _measured(recording: Recording, name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Times (s since start) and positions of joint `name`, as the robot published them."""
    if name not in recording.joint_names:
        return np.empty(0), np.empty(0)
    column = recording.joint_names.index(name)
    times = np.array([(stamp - recording.start) * 1e-9 for stamp, _ in recording.positions])
    return times, np.array([values[column] for _, values in recording.positions])


# --- Distributions and replays


def _draw_histogram(axes: Axes, seconds: Sequence[float], title: str, colour: str) -> None:
    values = np.asarray(seconds) * 1e3
    axes.hist(values, bins=min(40, max(8, len(values) // 3)), color=colour, alpha=0.85, rwidth=0.92)
    axes.set_title(title)
    axes.set_xlabel("milliseconds")
    axes.set_ylabel("chunks")
    axes.grid(visible=False, axis="x")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.18)
    top = axes.get_ylim()[1]
    for point, height in ((50, top), (99, 0.9 * top)):
        value = float(np.percentile(values, point))
        left = value > np.mean(axes.get_xlim())  # where there is room for the text
        axes.axvline(value, color=_INK, linewidth=1.1, linestyle="--")
        text = f" p{point} {value:.1f} ms "
        axes.text(value, height, text, va="top", ha="right" if left else "left", fontsize=9)


def _draw_replays(axes: Axes, recording: Recording) -> None:
    """How often each stage ran: an unchanged instruction costs nothing, a new frame always does."""
    stages = recording.status.replays if recording.status else ()
    names = [f"{name}\n({rate})" for name, rate, _ in stages]
    counts = [count for _, _, count in stages]
    bars = axes.barh(names, counts, color=_REPLAY_COLOUR, alpha=0.85, height=0.62)
    axes.bar_label(bars, padding=4, fontsize=10, fontweight="bold", color=_INK)
    axes.invert_yaxis()
    axes.set_xlim(0, max(counts, default=1) * 1.15)
    axes.set_title("Replays: only what had become stale")
    axes.set_xlabel("replays since configure")
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0, labelsize=9, labelcolor=_INK)
