"""What this package's kernels need of an installation, told in one line before anything is loaded."""

from __future__ import annotations

import importlib.util

import torch

from ..engine.errors import DeviceError
from .cuda.compiler import compiler_version
from .cuda.errors import KernelError


def require_kernels(device: torch.device) -> None:
    """Raise DeviceError if kernels cannot be compiled and launched for GPU `device`; a CPU needs none."""
    if device.type == "cpu":
        return
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None:
        raise DeviceError(f"kernels for '{device}' need cuda-core; install it with `pip install flashrt_ros[cuda]`")
    try:
        compiler_version()
    except KernelError as error:
        raise DeviceError(f"kernels for '{device}' cannot be compiled: {error}") from None
