"""What benchmarks of single kernels share: the GPU or a refusal in one line, times between device events, distances."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable
from statistics import median_high

import torch
from torch import Tensor

from flashrt_ros.engine import recording_into
from flashrt_ros.engine.devices import cuda_facts, unusable
from flashrt_ros.ops.cuda.compiler import KernelSource, full_text

_WARM_UP = 3


def gpu(benchmark: str, unsuited: Callable[[torch.device], str] | None = None) -> torch.device:
    """The GPU that `benchmark` runs on. Ends the program with one line if there is none, or none that serves.

    Args:
        benchmark: what the line begins with.
        unsuited: why a GPU does not serve; empty if it does.
    """
    device = torch.device("cuda", 0)
    reason = unusable(0, cuda_facts(0)) or (unsuited(device) if unsuited else "")
    if reason:
        sys.exit(f"{benchmark}: kernels are measured on a GPU, but {reason}")
    return device


def result_name(benchmark: str, gpu: str) -> str:
    """Name of the result file of `benchmark` on the GPU called `gpu`: `h200_products` on an H200."""
    if "H200" in gpu:
        return f"h200_{benchmark}"
    return f"{benchmark}_{re.sub(r'[^a-z0-9]+', '_', gpu.lower()).strip('_')}"


def digests(*kernels: str) -> dict[str, str]:
    """The beginning of the SHA-256 of each kernel's source with its headers: which source the figures are of."""
    texts = {name: full_text(KernelSource(name)) for name in kernels}
    return {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in texts.items()}


def graph_of(body: Callable[[int], object], count: int) -> Callable[[], None]:
    """`body(0)` … `body(count - 1)` as one CUDA graph, ready to be replayed; `body(0)` has run once before.

    What is returned keeps `body`: a graph knows addresses only, and what `body` alone holds must live as long.
    """
    body(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with recording_into(graph):
        for index in range(count):
            body(index)

    def replay(_read: Callable[[int], object] = body) -> None:
        graph.replay()

    return replay


def device_us(call: Callable[[], object], repeats: int) -> list[float]:
    """Microseconds between device events around each of `repeats` calls; each is finished before the next begins."""
    for _ in range(_WARM_UP):
        call()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    times = []
    for _ in range(repeats):
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) * 1e3)
    return times


def layer_us(body: Callable[[int], object], layers: int, repeats: int) -> float:
    """Microseconds of one of the `layers` bodies of a graph, median of `repeats` replays."""
    return median_high(device_us(graph_of(body, layers), repeats)) / layers


def distance(got: Tensor, exact: Tensor, origin: Tensor | None = None) -> float:
    """‖got − exact‖ / ‖exact − origin‖ in float64; the origin is zero if none is given."""
    wide = exact.double()
    length = wide if origin is None else wide - origin.double()
    return float((got.double() - wide).norm() / length.norm())
