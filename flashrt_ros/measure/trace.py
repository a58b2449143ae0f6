"""What ran on the device during one call: which kernels, for how long, and how idle it was in between."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from .errors import MeasureError

_GEMM = re.compile(
    r"gemm|gemv|nvjet|cutlass.*(gemm|mma)|xmma|splitkreduce|cublas|wgmma|matmul|aten::(mm|addmm|bmm|baddbmm|linear)\b"
    r"|\bexpert\b|skinny",
    re.IGNORECASE,
)
# Kernels of attention may be named after the instructions that they multiply with; they stand between products.
_ATTENTION = re.compile(r"attention|sdpa|fmha|flash_?(fwd|attn)", re.IGNORECASE)
_NOT_KERNELS = re.compile(r"^(Memcpy|Memset)", re.IGNORECASE)
_PROFILER_ITSELF = ("Activity Buffer Request", "ProfilerStep")
_LONGEST_PERIOD = 400


@dataclass(frozen=True)
class Span:
    """One kernel: its name, and when it ran, in microseconds."""

    name: str
    start: float
    duration: float
    stream: int = 0

    @property
    def end(self) -> float:
        """When it ended, in microseconds."""
        return self.start + self.duration

    @property
    def is_gemm(self) -> bool:
        """Whether it is a matrix product (or a kernel that holds several), by its name; attention is none."""
        return _GEMM.search(self.name) is not None and _ATTENTION.search(self.name) is None

    @property
    def is_kernel(self) -> bool:
        """Whether it is a kernel and not a copy or a fill by the copy engine."""
        return _NOT_KERNELS.search(self.name) is None


def traced(call: Callable[[], object], device: torch.device) -> list[Span]:
    """Everything that `call` ran on `device`, in the order in which it began.

    On a CPU these are the operations of PyTorch that were called, so that the analysis can be tried out anywhere.

    Raises:
        MeasureError: the profiler saw nothing, for instance because CUPTI is not permitted here.
    """
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
    with profile(activities=activities) as recorded:
        call()
        if on_gpu:
            torch.cuda.synchronize(device)
    kind = "CUDA" if on_gpu else "CPU"
    spans = [
        Span(event.name, event.time_range.start, event.time_range.elapsed_us(), int(getattr(event, "device_index", 0)))
        for event in recorded.events() or ()
        if event.device_type.name == kind
        and (on_gpu or _is_called(event))
        and not event.name.startswith(_PROFILER_ITSELF)
    ]
    if not spans:
        raise MeasureError(
            "the profiler saw no kernels; it needs CUPTI, which may be reserved for root "
            "(NVreg_RestrictProfilingToAdminUsers)"
        )
    return sorted(spans, key=lambda span: span.start)


def _is_called(event: Any) -> bool:
    """Whether a CPU event is an operation that no other operation called."""
    inner = event.cpu_parent is not None and event.cpu_parent.name.startswith("aten::")
    return event.name.startswith("aten::") and not inner


@dataclass(frozen=True)
class TraceFigures:
    """One call in figures; times in milliseconds.

    Attributes:
        kernels, gemms: how many.
        others_per_gemm: kernels between two matrix products, on average.
        kernel_ms, gemm_ms: sums of durations.
        gap_ms: time in which nothing ran, from the first kernel's start to the last one's end.
        span_ms: that whole time.
    """

    kernels: int
    gemms: int
    others_per_gemm: float
    kernel_ms: float
    gemm_ms: float
    gap_ms: float
    span_ms: float


def figures(spans: Sequence[Span]) -> TraceFigures:
    """Sum up a trace."""
    kernels = [span for span in spans if span.is_kernel]
    gemms = [span for span in kernels if span.is_gemm]
    span = max(s.end for s in spans) - min(s.start for s in spans)
    return TraceFigures(
        kernels=len(kernels),
        gemms=len(gemms),
        others_per_gemm=(len(kernels) - len(gemms)) / max(1, len(gemms)),
        kernel_ms=sum(s.duration for s in kernels) / 1e3,
        gemm_ms=sum(s.duration for s in gemms) / 1e3,
        gap_ms=(span - busy(spans)) / 1e3,
        span_ms=span / 1e3,
    )


def busy(spans: Sequence[Span]) -> float:
    """Microseconds in which at least one span ran; overlapping ones count once."""
    total, end = 0.0, float("-inf")
    for span in sorted(spans, key=lambda s: s.start):
        total += max(0.0, span.end - max(span.start, end))
        end = max(end, span.end)
    return total


def by_name(spans: Sequence[Span]) -> list[tuple[str, int, float]]:
    """(name, count, milliseconds) of every kind of kernel, the most expensive first."""
    found: dict[str, list[float]] = {}
    for span in spans:
        found.setdefault(span.name, []).append(span.duration)
    rows = [(name, len(times), sum(times) / 1e3) for name, times in found.items()]
    return sorted(rows, key=lambda row: -row[2])


def one_layer(spans: Sequence[Span], repeats: int = 3) -> list[Span]:
    """The spans of one layer: the shortest sequence of names that comes `repeats` times in a row, from the middle.

    A trace without such a sequence (a stage that is one kernel) is returned whole.
    """
    names = [span.name for span in spans]
    for period in range(2, min(_LONGEST_PERIOD, len(names) // repeats) + 1):
        starts = _repetitions(names, period, repeats)
        if starts:
            start = starts[len(starts) // 2]
            return list(spans[start : start + period])
    return list(spans)


def _repetitions(names: Sequence[str], period: int, repeats: int) -> list[int]:
    """Positions at which a sequence of `period` names, of more than one kind, comes `repeats` times in a row."""
    needed, run, starts = period * (repeats - 1), 0, []
    for index in range(period, len(names)):
        run = run + 1 if names[index] == names[index - period] else 0
        start = index - needed - period + 1
        if run >= needed and len(set(names[start : start + period])) > 1:
            starts.append(start)
    return starts
