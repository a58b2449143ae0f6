"""Counting the ticks that a late timer leaves out, so that every tick that was due is accounted for."""

from __future__ import annotations


class TickCounter:
    """Knows when the ticks of a steady timer are due.

    A timer that is served late, because the executor did not get the processor, fires once for all the periods that
    have passed, and says nothing.

    Args:
        period_ns: of the timer.
    """

    def __init__(self, period_ns: int) -> None:
        self._period_ns = period_ns
        self._due_ns = 0

    def restart(self, steady_ns: int) -> None:
        """The timer was started at `steady_ns` (steady clock)."""
        self._due_ns = steady_ns + self._period_ns

    def missed(self, steady_ns: int) -> int:
        """The timer fires at `steady_ns`; how many ticks before this one it left out."""
        missed = max(0, steady_ns - self._due_ns) // self._period_ns
        self._due_ns += (missed + 1) * self._period_ns
        return missed
