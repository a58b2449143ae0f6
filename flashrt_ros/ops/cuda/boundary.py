"""What kernels assume of a tensor's memory, checked where it is handed over: what they would read wrongly has no error
of its own."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .errors import KernelError

_WIDEST_LOAD = 16  # bytes


def demand_dense(op: str, dtype: torch.dtype, *, alignment: int = _WIDEST_LOAD, **tensors: Tensor) -> None:
    """KernelError unless all `tensors` are of `dtype`, with their rows one behind the other from an aligned address.

    Kernels that are given no distance between rows would read an expanded tensor beyond its end, and other values than
    those of a part of wider rows.

    Args:
        alignment: bytes that the kernel reads or writes at once.
    """
    for name, tensor in tensors.items():
        if tensor.dtype != dtype or not tensor.is_contiguous():
            raise KernelError(
                f"{op}: '{name}' must be {_short(dtype)} with contiguous rows one behind the other, got "
                f"{_short(tensor.dtype)}{list(tensor.shape)} with strides {tensor.stride()}; give its contiguous()"
            )
        if tensor.data_ptr() % alignment:
            raise KernelError(
                f"{op}: '{name}' must begin at a multiple of {alignment} bytes, got {tensor.data_ptr():#x}; give its "
                "clone()"
            )


def made_dense(tensor: Tensor) -> Tensor:
    """`tensor` where `demand_dense` takes it, otherwise a copy that it takes."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % _WIDEST_LOAD else tensor


def demand_device(what: str, tensor: Tensor, device: torch.device) -> None:
    """KernelError unless `tensor` is on `device`: anywhere else its address means nothing, or something else."""
    found = tensor.device
    if found.type != device.type or device.index not in (None, found.index):
        raise KernelError(f"{what} is on '{found}', the kernel runs on '{device}'; move it there")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def demand_choices(op: str, variant: Iterable[str], known: Iterable[str]) -> None:
    """KernelError unless `variant` names choices that the kernel has: another one would change nothing, silently."""
    for name in variant:
        if name not in known:
            raise KernelError(f"{op}: no choice is called '{name}'; there are: {', '.join(known)}")
