"""Calls that are counted in operations of torch, where a test must not depend on how busy the machine is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashrt_ros.accelerate.device import finish


class OperationCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that run within it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def counted(call: Callable[[], object], calls: int, device: torch.device) -> Iterator[float]:
    """Milliseconds of each call, if an operation took a microsecond and everything else nothing."""
    for _ in range(calls):
        with OperationCount() as operations:
            call()
            finish(device)
        yield operations.count / 1e3
