"""Which implementation of an operation runs, and why not the faster one."""

from __future__ import annotations

from dataclasses import dataclass

REFERENCE = "reference"


@dataclass(frozen=True)
class KernelReport:
    """The verdict on one operation or part of a plan.

    `kernel` names the implementation in use, `reference` for the PyTorch definition. `reason` says why a faster one was
    refused; it is empty where none was.
    """

    op: str
    kernel: str = REFERENCE
    reason: str = ""

    @property
    def fallback(self) -> bool:
        """True if a faster implementation exists and was refused."""
        return bool(self.reason)

    def __str__(self) -> str:
        return f"{self.op}: {self.kernel}" + (f" ({self.reason})" if self.reason else "")
