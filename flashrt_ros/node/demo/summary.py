"""The figures of a run: what `demo_out/summary.json` says. Imports no ROS."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from .errors import DemoError
from .recording import Recording, percentiles_ms


def summarise(recording: Recording) -> dict[str, Any]:
    """The summary of a run.

    Returns:
        `chunks` received; `rate_hz` of their arrivals; `latency_ms` from when the node began to fill the windows
        until the chunk arrived at this process; `age_ms` from the stamp of the oldest observation that a chunk used
        until it arrived here; `refused` messages and chunks, `stale_replays` and `bytes_copied_per_frame` by the
        node's last status; `epochs` that chunks arrived from; `fingerprint` of the contract.

    Raises:
        DemoError: no chunk or no status arrived, or the chunks contradict each other or the status.
    """
    status, chunks = recording.status, recording.chunks
    if status is None or not chunks:
        reason = f" ({status.reason})" if status is not None and status.reason else ""
        raise DemoError(f"the policy node published no {'status' if status is None else 'chunk'}{reason}")
    _check(recording)
    latencies = [chunk.latency for chunk in chunks]
    return {
        "chunks": len(chunks),
        "rate_hz": round(arrival_rate(recording), 2),
        "latency_ms": percentiles_ms(latencies, (50, 95, 99)),
        "age_ms": percentiles_ms([chunk.age for chunk in chunks], (50, 99)),
        "refused": sum(refused.count for refused in recording.refusals),
        "stale_replays": status.stale_replays,
        "epochs": len(recording.epochs()),
        "bytes_copied_per_frame": status.bytes_copied_per_frame,
        "fingerprint": status.fingerprint,
    }


def arrival_rate(recording: Recording) -> float:
    """Chunks a second between the first and the last arrival; 0 for a single chunk."""
    first, last = recording.chunks[0].arrival, recording.chunks[-1].arrival
    return (len(recording.chunks) - 1) / ((last - first) * 1e-9) if last > first else 0.0


def _check(recording: Recording) -> None:
    assert recording.status is not None
    ids = [chunk.chunk_id for chunk in recording.chunks]
    if any(later <= earlier for earlier, later in pairwise(ids)):
        raise DemoError(f"chunk ids are not strictly increasing: {ids}")
    fingerprints = {chunk.fingerprint for chunk in recording.chunks} | {recording.status.fingerprint}
    if len(fingerprints) != 1:
        raise DemoError(f"chunks and status name different contracts: {', '.join(sorted(fingerprints))}")
