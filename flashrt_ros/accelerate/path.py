"""Which path a call takes while it is recorded and captured: what torch tells those who ask about captures.

Some code asks torch whether a CUDA graph is being captured, and computes differently then: transformers leave a causal
mask to the attention kernel, and only while a graph is captured make one, with which torch chooses another kernel. A
call must be recorded, warmed up and captured on one path, so it is told the same each time, whatever really goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from .errors import CaptureError

_one_at_a_time = threading.RLock()  # torch's functions belong to the whole process: the last to leave restores them


@contextmanager
def told(capturing: bool) -> Iterator[None]:
    """Within the block this thread is told `capturing` when it asks whether a graph is being captured."""
    with _replaced("is_current_stream_capturing", lambda: capturing):
        yield


@contextmanager
def refusing_to_wait() -> Iterator[None]:
    """CaptureError where this thread waits for the GPU: a capture would break there, and leave torch's state broken."""

    def synchronize(device: Any = None) -> None:
        raise CaptureError("torch.cuda.synchronize waits for the GPU, which a graph cannot")

    with _replaced("synchronize", synchronize):
        yield


@contextmanager
def _replaced(name: str, function: Callable[..., Any]) -> Iterator[None]:
    """`torch.cuda.name` is `function` for this thread, and what it was for all others."""
    with _one_at_a_time:
        mine, original = threading.get_ident(), getattr(torch.cuda, name)

        def chosen(*args: Any, **kwargs: Any) -> Any:
            return (function if threading.get_ident() == mine else original)(*args, **kwargs)

        with patch.object(torch.cuda, name, chosen):
            yield
