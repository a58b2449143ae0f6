"""May this observation be acted on? The age of every stream by two clocks, its order, and the skew between
cameras.

A header says when the sensor measured, by a clock that may be wrong; the steady clock says when the message
came, whatever the sensor thinks. Both ages must be within the limit: the first catches a delayed pipeline,
the second a driver that repeats or future-dates its stamps. A required stream that is missing or stale stops
the decision; nothing is ever replaced by an older or an empty observation.

All times are nanoseconds, as `int`. Objects here belong to one thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum


class Reason(IntEnum):
    """Why an observation is not fresh. The numbers are stable, so that a message may carry them."""

    NO_PUBLISHER = 1
    NO_MESSAGE = 2
    ZERO_STAMP = 3
    FROM_THE_FUTURE = 4
    BACKWARDS = 5
    HEADER_TOO_OLD = 6
    RECEIVED_TOO_LONG_AGO = 7
    SKEW = 8


@dataclass(frozen=True, slots=True)
class Refusal:
    """One reason why a decision may not be taken now. `stream` is its name; for a skew, both names."""

    stream: str
    reason: Reason
    text: str


@dataclass(frozen=True, slots=True)
class Arrival:
    """The newest message of a stream: its header stamp (node clock) and when it was received (steady clock),
    in ns."""

    stamp_ns: int
    received_ns: int


@dataclass(frozen=True, slots=True)
class FreshnessLimits:
    """Limits in nanoseconds. ValueError unless they are positive; only the tolerance for the future may be
    zero."""

    max_age_ns: int
    future_tolerance_ns: int
    max_skew_ns: int

    def __post_init__(self) -> None:
        for name, smallest in (("max_age_ns", 1), ("future_tolerance_ns", 0), ("max_skew_ns", 0)):
            if getattr(self, name) < smallest:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least {smallest}")

    @classmethod
    def from_seconds(cls, max_age: float, future_tolerance: float, max_skew: float) -> FreshnessLimits:
        """The same limits, given in seconds."""
        return cls(round(max_age * 1e9), round(future_tolerance * 1e9), round(max_skew * 1e9))


class StreamFreshness:
    """The rule for one stream, with what it remembers: the last accepted stamp, and how often it refused and
    why.

    Args:
        stream: how people call it, as in `camera 'top' (/top/image_raw)`.
        limits: ages and tolerances.
    """

    def __init__(self, stream: str, limits: FreshnessLimits) -> None:
        self.stream = stream
        self.refusals: Counter[Reason] = Counter()
        self._limits = limits
        self._accepted_stamp_ns: int | None = None

    def reset(self) -> None:
        """Forget the last accepted stamp: at activation, and when the node's clock has jumped. Counters
        stay."""
        self._accepted_stamp_ns = None

    def check(self, arrival: Arrival | None, now_ns: int, steady_ns: int, publishers: int) -> Refusal | None:
        """Judge the newest message of the stream, once a decision.

        Args:
            arrival: what came last since activation, or None if nothing did.
            now_ns: node clock.
            steady_ns: steady clock, the one that `arrival.received_ns` was read from.
            publishers: how many publishers the topic has; only looked at when nothing came.

        Returns:
            None if the message may be used; its stamp is remembered. Otherwise the refusal, which is counted.
        """
        refusal = self._missing(publishers) if arrival is None else self._judge(arrival, now_ns, steady_ns)
        if refusal is not None:
            self.refusals[refusal.reason] += 1
        elif arrival is not None:
            self._accepted_stamp_ns = arrival.stamp_ns
        return refusal

    def _missing(self, publishers: int) -> Refusal:
        if publishers == 0:
            return self._refuse(Reason.NO_PUBLISHER, "nobody publishes it; start its driver or remap the topic")
        count = "its publisher has" if publishers == 1 else f"its {publishers} publishers have"
        return self._refuse(Reason.NO_MESSAGE, f"no message yet; {count} sent nothing since activation")

    def _judge(self, arrival: Arrival, now_ns: int, steady_ns: int) -> Refusal | None:
        limits = self._limits
        age_ns, received_age_ns = now_ns - arrival.stamp_ns, steady_ns - arrival.received_ns
        if arrival.stamp_ns == 0:
            return self._refuse(Reason.ZERO_STAMP, "its header has no stamp (0); the driver must stamp it")
        if -age_ns > limits.future_tolerance_ns:
            tolerance = seconds(limits.future_tolerance_ns)
            found = f"its stamp is {seconds(-age_ns)} in the future, tolerance {tolerance}"
            return self._refuse(Reason.FROM_THE_FUTURE, f"{found}; {_CLOCK_ADVICE}")
        if self._accepted_stamp_ns is not None and arrival.stamp_ns < self._accepted_stamp_ns:
            step = seconds(self._accepted_stamp_ns - arrival.stamp_ns)
            return self._refuse(Reason.BACKWARDS, f"its stamp went back by {step}, limit 0 s; {_CLOCK_ADVICE}")
        if received_age_ns > limits.max_age_ns:
            found = f"the last message came {seconds(received_age_ns)} ago, limit {seconds(limits.max_age_ns)}"
            return self._refuse(Reason.RECEIVED_TOO_LONG_AGO, f"{found}; it stopped or is too slow")
        if age_ns > limits.max_age_ns:
            found = f"its stamp is {seconds(age_ns)} old, limit {seconds(limits.max_age_ns)}"
            return self._refuse(Reason.HEADER_TOO_OLD, f"{found}; its pipeline is slow, or the clocks differ")
        return None

    def _refuse(self, reason: Reason, text: str) -> Refusal:
        return Refusal(self.stream, reason, f"{self.stream}: {text}")


_CLOCK_ADVICE = "synchronise the clocks, and set use_sim_time alike everywhere"


class FreshnessGate:
    """The rule for all streams that one decision needs.

    Args:
        streams: every required stream, name to the words that people use for it.
        cameras: the streams among them that must have been taken together, within the limit for skew.
        limits: shared by all streams.
    """

    def __init__(self, streams: Mapping[str, str], cameras: Sequence[str], limits: FreshnessLimits) -> None:
        unknown = [camera for camera in cameras if camera not in streams]
        if unknown:
            raise ValueError(f"cameras {unknown} are not among the streams {list(streams)}")
        self._rules = {name: StreamFreshness(description, limits) for name, description in streams.items()}
        self._cameras = tuple(cameras)
        self._limits = limits
        self.skew_refusals = 0

    def reset(self) -> None:
        """Forget the last accepted stamps: at activation, and when the node's clock has jumped. Counters
        stay."""
        for rule in self._rules.values():
            rule.reset()

    def check(
        self,
        arrivals: Mapping[str, Arrival | None],
        now_ns: int,
        steady_ns: int,
        publishers: Mapping[str, int],
    ) -> tuple[Refusal, ...]:
        """Judge every stream, and the cameras against each other if all of them are fresh.

        Args:
            arrivals: the newest message of each stream since activation; absent or None if nothing came.
            now_ns: node clock.
            steady_ns: steady clock.
            publishers: publishers of each topic; an absent stream counts as having none.

        Returns:
            Every refusal, so that a status can name all the streams that are missing; empty if a decision may
            be taken.
        """
        refusals = [
            refusal
            for name, rule in self._rules.items()
            if (refusal := rule.check(arrivals.get(name), now_ns, steady_ns, publishers.get(name, 0)))
        ]
        skew = None if refusals else self._check_skew(arrivals)
        return (skew,) if skew else tuple(refusals)

    @property
    def refusals(self) -> Mapping[str, Mapping[Reason, int]]:
        """How often each stream was refused, by reason, since construction."""
        return {name: dict(rule.refusals) for name, rule in self._rules.items()}

    def _check_skew(self, arrivals: Mapping[str, Arrival | None]) -> Refusal | None:
        stamps = {name: arrival.stamp_ns for name in self._cameras if (arrival := arrivals.get(name))}
        if len(stamps) < 2:
            return None
        oldest, newest = min(stamps, key=stamps.__getitem__), max(stamps, key=stamps.__getitem__)
        skew_ns = stamps[newest] - stamps[oldest]
        if skew_ns <= self._limits.max_skew_ns:
            return None
        self.skew_refusals += 1
        pair = f"{self._rules[oldest].stream} and {self._rules[newest].stream}"
        found = f"taken {seconds(skew_ns)} apart, limit {seconds(self._limits.max_skew_ns)}"
        return Refusal(pair, Reason.SKEW, f"{pair}: {found}; trigger the cameras together or raise the limit")


def seconds(nanoseconds: int) -> str:
    """A duration as people read it."""
    return f"{nanoseconds / 1e9:.3f} s"
