"""What can go wrong between a kernel's source and its launch."""

from __future__ import annotations


class KernelError(RuntimeError):
    """A kernel could not be found, compiled, loaded or launched, or its self-test failed."""
