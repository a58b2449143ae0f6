"""Ten minutes at 30 decisions a second: is the node's memory flat, and is every tick accounted for?

Run: `python benchmarks/soak.py [--seconds 600] [--name soak]` (writes benchmarks/results/soak.json).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from _common import write_result

from flashrt_ros.node.demo.graph import Graph, running_graph
from flashrt_ros.node.demo.operator_node import nanoseconds
from flashrt_ros.node.demo.scene import JOINTS

RATE_HZ = 30.0
_ENDS = (("lower", -1.0), ("upper", 1.0))
# Two denoising steps instead of ten and one thread, so that a decision of the tiny policy takes less than a period on
# one of two cores. No wait for images: the timer alone sets the pace.
# With so few steps the seeded weights leave the arm's limits, which are therefore those of no arm.
PARAMETERS: dict[str, object] = {"rate_hz": RATE_HZ, "image_wait": 0.0, "cpu_threads": 1, "policy.steps": 2}
PARAMETERS |= {"max_first_step": 100.0, "max_step": 100.0}
PARAMETERS |= {f"limits.{joint.name}.{end}": sign * 100.0 for joint in JOINTS for end, sign in _ENDS}
BAR = 0.01  # largest relative change of memory from the second minute to the last


def resident_bytes(pid: int) -> dict[str, int]:
    """Resident memory of a process by kind, as the kernel counts it."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "RssAnon", "RssFile", "RssShmem")}


def sample(graph: Graph, seconds: float) -> list[tuple[float, dict[str, int]]]:
    """(seconds since the first chunk, memory of the node) about once a second."""
    pid = graph.processes.pid("policy")
    start, samples = time.monotonic(), []
    while (elapsed := time.monotonic() - start) < seconds:
        if not samples or elapsed - samples[-1][0] >= 1.0:
            samples.append((elapsed, resident_bytes(pid)))
        graph.step()
    return samples


def memory_figures(samples: list[tuple[float, dict[str, int]]], seconds: float) -> dict[str, Any]:
    """Mean of the second minute and of the last one; of the second and last tenth in a shorter run."""
    span = min(60.0, seconds / 10.0)

    def mean(begin: float, kind: str) -> float:
        return float(np.mean([memory[kind] for at, memory in samples if begin <= at < begin + span]))

    def mebibytes(begin: float) -> dict[str, float]:
        return {kind: round(mean(begin, kind) / 2**20, 3) for kind in samples[0][1]}

    # RssShmem is shared: pages of the publishers' ring buffers that this process has read at least once.
    private = ("RssAnon", "RssFile")
    return {
        "span_s": span,
        "second_span_mib": mebibytes(span),
        "last_span_mib": mebibytes(seconds - span),
        "relative_change": round(mean(seconds - span, "VmRSS") / mean(span, "VmRSS") - 1.0, 5),
        "relative_change_private": round(
            sum(mean(seconds - span, kind) for kind in private) / sum(mean(span, kind) for kind in private) - 1.0, 5
        ),
        "bar": BAR,
    }


def tick_figures(before: Any, after: Any) -> dict[str, Any]:
    """Ticks between two EngineStatus messages: those due, and what became of them."""
    elapsed = (nanoseconds(after.stamp) - nanoseconds(before.stamp)) * 1e-9
    fates = {
        name: getattr(after, name) - getattr(before, name)
        for name in ("chunks_published", "chunks_dropped", "ticks_skipped", "ticks_without_observation")
    }
    due = elapsed * RATE_HZ
    return {
        "elapsed_s": round(elapsed, 3),
        "due": round(due, 1),
        **fates,
        "unexplained": round(due - sum(fates.values()), 1),
    }


def main() -> None:
    """Run the graph and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="time from the first chunk on")
    parser.add_argument("--name", default="soak", help="of the result file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as logs, running_graph(Path(logs), lambda: None, overrides=PARAMETERS) as graph:
        graph.begin()
        before = graph.operator.status_message
        samples = sample(graph, args.seconds)
        graph.finish()
        after = graph.operator.status_message
    result = {
        "memory": memory_figures(samples, args.seconds),
        "ticks": tick_figures(before, after),
        "stale_replays": after.stale_replays,
        "session_ms_p50": round(after.session_time.p50 * 1e3, 2),
        "parameters": PARAMETERS,
    }
    write_result(args.name, result, protocol=f"{args.seconds:g} s; resident memory of the node's process once a second")


if __name__ == "__main__":
    main()
