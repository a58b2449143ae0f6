"""The status once more, as `/diagnostics` has it: one entry for the policy and one for each input."""

from __future__ import annotations

from builtin_interfaces.msg import Time
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue

from ..msg import EngineStatus, Quantiles, StreamStatus
from .decisions import Decider

_STATES = {
    StreamStatus.OK: "ok",
    StreamStatus.NO_PUBLISHER: "no publisher",
    StreamStatus.NO_MESSAGE: "no message yet",
    StreamStatus.STALE: "stale",
    StreamStatus.REFUSED: "refused",
    StreamStatus.INCOMPATIBLE_QOS: "incompatible quality of service",
}


def diagnostics(node_name: str, status: EngineStatus, decider: Decider, active: bool) -> DiagnosticArray:
    """All entries of one node.

    An entry is an ERROR only while the node is active and this is what keeps chunks from coming; an inactive node has
    warnings. A policy whose inputs are missing is not at fault, so that is a warning of its own entry.
    """
    entries = [_policy(node_name, status, decider, active)]
    entries += [_stream(node_name, stream, active) for stream in status.streams]
    return DiagnosticArray(header=_header(status.stamp), status=entries)


def _policy(node_name: str, status: EngineStatus, decider: Decider, active: bool) -> DiagnosticStatus:
    level = DiagnosticStatus.OK if active and not status.reason else DiagnosticStatus.WARN
    if active and (decider.fault or status.stalled):
        level = DiagnosticStatus.ERROR
    values = {
        "policy": status.policy,
        "checkpoint": status.checkpoint,
        "fingerprint": status.fingerprint,
        "device": status.device,
        "epoch": status.epoch,
        "chunks published": status.chunks_published,
        "chunks dropped": status.chunks_dropped,
        "ticks skipped": status.ticks_skipped,
        "rate (Hz)": f"{status.rate:.2f}",
        "latency p50, p95, p99 (ms)": _milliseconds(status.latency),
        "session time p50, p95, p99 (ms)": _milliseconds(status.session_time),
        "node overhead p50, p95, p99 (ms)": _milliseconds(status.overhead),
    }
    return _entry(f"{node_name}: policy", level, status.reason or "chunks flow", status.device, values)


def _stream(node_name: str, stream: StreamStatus, active: bool) -> DiagnosticStatus:
    level = DiagnosticStatus.OK
    if stream.state != StreamStatus.OK:
        level = DiagnosticStatus.ERROR if active else DiagnosticStatus.WARN
    values = {
        "topic": stream.topic,
        "state": _STATES[stream.state],
        "publishers": stream.publishers,
        "rate (Hz)": f"{stream.rate:.2f}",
        "received": stream.received,
        "used": stream.used,
        "refused": stream.refused,
        "header age (ms)": f"{1e3 * stream.header_age:.1f}",
        "receive age (ms)": f"{1e3 * stream.receive_age:.1f}",
    }
    return _entry(f"{node_name}: {stream.name}", level, stream.reason or "ok", stream.topic, values)


def _entry(name: str, level: bytes, message: str, hardware: str, values: dict[str, object]) -> DiagnosticStatus:
    pairs = [KeyValue(key=key, value=str(value)) for key, value in values.items()]
    return DiagnosticStatus(name=name, level=level, message=message, hardware_id=hardware, values=pairs)


def _milliseconds(times: Quantiles) -> str:
    return ", ".join(f"{1e3 * value:.2f}" for value in (times.p50, times.p95, times.p99))


def _header(stamp: Time) -> object:
    header = DiagnosticArray().header
    header.stamp = stamp
    return header
