"""What can go wrong while something is measured."""

from __future__ import annotations


class MeasureError(RuntimeError):
    """A measurement cannot be made here; the message says what is missing and what to do."""
