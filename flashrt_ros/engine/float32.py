"""Float32 products as they are written down, whatever the process allows PyTorch to round."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

process_wide = threading.RLock()
"""Held by a thread while it changes what holds for the whole process, or needs that nobody else does."""

_BACKENDS: Any = torch.backends  # its type information lacks the newer switches
_EXACT, _INHERITED = "ieee", "none"  # what a switch says: round nothing; do as the more general switch says


@contextmanager
def exact_float32() -> Iterator[None]:
    """Within the block, float32 products, convolutions and recurrent layers are rounded to no narrower type on the way.

    The switches are the process's: all threads compute in this way meanwhile, a second block waits for the end of the
    first, and so does whoever records a graph. Behind the block each switch is as it was in front of it.
    """
    with process_wide:
        restore = _put_aside()
        try:
            yield
        finally:
            restore()


def _put_aside() -> Callable[[], None]:
    """Make every switch exact; returns what makes them as they were.

    There are two generations of them. PyTorch refuses to read an older one that contradicts the newer ones, so that
    these go first, and both say the same in the end.
    """
    cudnn, mkldnn = _BACKENDS.cudnn, _BACKENDS.mkldnn
    switches = (_BACKENDS.cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn)
    before = [switch.fp32_precision for switch in switches]

    def exact() -> None:
        for switch in switches:
            switch.fp32_precision = _EXACT

    def restore() -> None:
        torch.set_float32_matmul_precision(older_matmul)
        cudnn.allow_tf32 = older_cudnn
        for switch, value in zip(switches, before, strict=True):
            switch.fp32_precision = _INHERITED
            if switch.fp32_precision != value:
                switch.fp32_precision = value

    exact()
    older_matmul, older_cudnn = torch.get_float32_matmul_precision(), _older_cudnn()
    torch.set_float32_matmul_precision("highest")
    cudnn.allow_tf32 = False
    exact()  # the older ones set the newer ones as well, and not always to this
    return restore


def _older_cudnn() -> bool:
    """cuDNN's older switch, while the newer ones are exact."""
    try:
        return torch.backends.cudnn.allow_tf32
    except RuntimeError:  # it contradicts them
        return True
