"""How each input stream fares, in words that tell "nobody publishes" from "nothing came yet"."""

from __future__ import annotations

import math
import time

from rclpy.node import Node

from ..msg import Quantiles, Refusal, StreamStatus
from .cdr import CdrError, StringMessage
from .freshness import seconds
from .statistics import RollingWindow
from .streams import INSTRUCTION, Stream

_STALE = (Refusal.HEADER_TOO_OLD, Refusal.RECEIVED_TOO_LONG_AGO)
_FRACTIONS = (0.5, 0.95, 0.99, 1.0)


def stream_status(node: Node, stream: Stream, max_age_ns: int, instruction: str) -> StreamStatus:
    """The status of one stream now; `instruction` is what is in force, wherever it came from."""
    steady_ns = time.monotonic_ns()
    newest = stream.newest
    publishers = stream.publishers
    if stream.name == INSTRUCTION and instruction.strip() and stream.last_refusal is None:
        state, reason = StreamStatus.OK, ""
    else:
        state, reason = _judge(node, stream, publishers, steady_ns, max_age_ns)
    return StreamStatus(
        name=stream.name,
        topic=stream.topic,
        required=True,
        state=state,
        reason=reason,
        publishers=publishers,
        rate=stream.rate.rate(steady_ns),
        header_age=_header_age(node, stream),
        receive_age=math.nan if newest is None else (steady_ns - newest.steady_ns) / 1e9,
        age=quantiles(stream.ages),
        received=stream.rate.total,
        used=stream.used,
        overwritten=stream.overwritten,
        refused=sum(count for count, _ in stream.refusals.values()),
        refusals=refusals(stream.refusals),
    )


def quantiles(window: RollingWindow) -> Quantiles:
    """The quantiles of a window; all 0 where nothing was measured."""
    if not len(window):
        return Quantiles()
    p50, p95, p99, maximum = window.quantiles(_FRACTIONS)
    return Quantiles(count=len(window), p50=p50, p95=p95, p99=p99, maximum=maximum)


def refusals(counted: dict[int, tuple[int, str]]) -> list[Refusal]:
    """The causes that occurred, by number."""
    return [Refusal(cause=c, count=n, last_reason=text) for c, (n, text) in sorted(counted.items())]


def _judge(node: Node, stream: Stream, publishers: int, steady_ns: int, max_age_ns: int) -> tuple[int, str]:
    newest, refused = stream.newest, stream.last_refusal
    if newest is None:
        return _missing(node, stream, publishers)
    if refused is not None:
        cause, text = refused
        return (StreamStatus.STALE if cause in _STALE else StreamStatus.REFUSED), text
    age_ns = steady_ns - newest.steady_ns
    if stream.name != INSTRUCTION and age_ns > max_age_ns:
        reason = f"{stream.description}: the last message came {seconds(age_ns)} ago, limit {seconds(max_age_ns)}"
        return StreamStatus.STALE, reason
    return StreamStatus.OK, ""


def _missing(node: Node, stream: Stream, publishers: int) -> tuple[int, str]:
    """Why there is no message; the graph is asked only where the subscription has no partner."""
    if publishers:
        count = "its publisher has" if publishers == 1 else f"its {publishers} publishers have"
        return StreamStatus.NO_MESSAGE, f"{stream.description}: no message yet; {count} sent nothing"
    others = {info.topic_type for info in node.get_publishers_info_by_topic(stream.topic)}
    wanted = f"sensor_msgs/msg/{stream.kind.message_type.__name__}"
    if stream.incompatible_qos and others:
        text = f"a publisher offers an incompatible {stream.incompatible_qos}; change its quality of service"
        return StreamStatus.INCOMPATIBLE_QOS, f"{stream.description}: {text}"
    if others and wanted not in others and stream.name != INSTRUCTION:
        text = f"it carries {', '.join(sorted(others))}, and {wanted} is expected; remap it, or set views.*.compressed"
        return StreamStatus.NO_PUBLISHER, f"{stream.description}: {text}"
    return StreamStatus.NO_PUBLISHER, f"{stream.description}: nobody publishes it; start its driver or remap the topic"


def _header_age(node: Node, stream: Stream) -> float:
    """Node clock minus header stamp (s); NaN if there is no message, or none with a header."""
    newest = stream.newest
    try:
        message = None if newest is None else stream.kind.parse(newest.raw)
    except CdrError:
        return math.nan
    if message is None or isinstance(message, StringMessage):
        return math.nan
    return float(node.get_clock().now().nanoseconds - message.header.stamp_ns) / 1e9
