"""What can go wrong while a model is accelerated."""

from __future__ import annotations


class AccelerateError(RuntimeError):
    """A model, its examples or a structure were described or used wrongly; the message says what and what to do."""


class ReceiptError(AccelerateError):
    """A receipt is unreadable, was edited, or belongs to another model or environment.

    `field` names the entry that differs, such as "model.weights" or "environment.torch".
    """

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class Outside(Exception):  # noqa: N818
    """Raised by a replacement, before it has changed anything, for values that only the original serves.

    The guard counts the call, with the text as its reason, and runs the original.
    """


class DeviceFaultError(AccelerateError):
    """The device reported a fault, such as an illegal memory access; the message says of which candidate.

    Nothing runs on that device in this process any more, so that the search cannot go on without the candidate.
    """


class CaptureError(AccelerateError):
    """A call cannot become one graph; the message says which operation is in the way."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
