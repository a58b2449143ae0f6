"""Launches that are prepared once: for what must not wait for Python."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from .errors import KernelError
from .kernel import Kernel

if TYPE_CHECKING:
    Argument = ctypes._SimpleCData[Any] | ctypes.Structure


class PreparedLaunch:
    """One launch with its grid and its arguments in place: a call hands one address to the driver, and no more.

    Args:
        kernel: what to launch.
        blocks: thread blocks, in one dimension.
        threads: of a block.
        arguments: the kernel's arguments in their order, passed by value. They are read at each call, so changing one's
            content changes the next launch.
    """

    def __init__(self, kernel: Kernel, blocks: int, threads: int, arguments: Sequence[Argument]) -> None:
        from cuda.bindings import driver

        self._kernel = kernel
        self._index = kernel.device.index or 0
        self._arguments = tuple(arguments)  # kept alive: the addresses below point to them
        self._addresses = (ctypes.c_void_p * len(self._arguments))(*map(ctypes.addressof, self._arguments))
        self._parameters = ctypes.addressof(self._addresses)
        function = driver.CUfunction(int(kernel.driver_kernel.handle))  # the driver takes a CUkernel for one
        self._enqueue = partial(driver.cuLaunchKernel, function, blocks, 1, 1, threads, 1, 1, kernel.shared_bytes)

    def __call__(self) -> None:
        """Enqueue the launch on the current stream of the kernel's device; KernelError if the driver refuses."""
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        if int(self._enqueue(stream, self._parameters, 0)[0]):
            self._enqueue_with_context(stream)

    def _enqueue_with_context(self, stream: int) -> None:
        """Once more, with the device's context current: a thread that has used no CUDA yet has none."""
        with torch.cuda.device(self._kernel.device):
            torch.cuda.synchronize()  # the cheapest call that surely makes it current
            (result,) = self._enqueue(stream, self._parameters, 0)
        if int(result):
            raise KernelError(f"{self._kernel.name}: the driver refuses the launch ({result.name})")
