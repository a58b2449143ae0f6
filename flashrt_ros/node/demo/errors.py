"""What can go wrong with the demo."""

from __future__ import annotations


class DemoError(Exception):
    """The demo cannot begin or go on; the message is one line that says what was wrong and what to do."""
