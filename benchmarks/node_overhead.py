"""What the node adds to a decision: receipt of the newest image → chunk published, less the session's own time.

Two cameras of 640x480 at 30 Hz, joint states at 100 Hz and the policy node, each a process of its own, over DDS.

Run: `python benchmarks/node_overhead.py [--seconds 130]` (writes benchmarks/results/node_overhead.json).
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from _common import write_result

from flashrt_ros.msg import Quantiles
from flashrt_ros.node.demo.graph import Graph, running_graph

BAR_MS = {"p50": 1.0, "p99": 3.0}
PARAMETERS = {
    # Each decision waits for a new frame of both views, so that the time in which a frame lies in its slot and
    # nobody has asked for a chunk yet does not count as the node's.
    "image_wait": 0.1,
    "rate_hz": 10.0,
    "cpu_threads": 1,
}


def milliseconds(quantiles: Quantiles) -> dict[str, float]:
    """A Quantiles message of seconds."""
    names = ("p50", "p95", "p99", "maximum")
    return {name: round(getattr(quantiles, name) * 1e3, 3) for name in names}


def measure(graph: Graph, seconds: float) -> dict[str, Any]:
    """Let the graph run, and read the node's own figures."""
    graph.run_for(seconds)
    status = graph.operator.status_message
    return {
        "overhead_ms": milliseconds(status.overhead),
        "bar_ms": BAR_MS,
        "latency_ms": milliseconds(status.latency),
        "session_ms": milliseconds(status.session_time),
        "decisions": status.overhead.count,
        "chunks_published": status.chunks_published,
        "ticks_skipped": status.ticks_skipped,
        "stale_replays": status.stale_replays,
        "camera_hz": {stream.name: round(stream.rate, 2) for stream in status.streams},
        "parameters": PARAMETERS,
    }


def main() -> None:
    """Run the graph and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=130.0, help="time from the first chunk on")
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as logs, running_graph(Path(logs), lambda: None, overrides=PARAMETERS) as graph:
        result = measure(graph, seconds)
    protocol = (
        f"{seconds:g} s; quantiles of the node's newest 1000 decisions, as EngineStatus tells them; latency: callback "
        "of the newer of the two images → publish() of the chunk has returned; session: first byte copied into a "
        "window → actions; overhead: the difference, decision by decision"
    )
    write_result("node_overhead", result, protocol)


if __name__ == "__main__":
    main()
