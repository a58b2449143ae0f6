"""Launches that are prepared once: for what must not wait for Python."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ...engine.driver import current_stream, driver
from ...engine.errors import DriverError
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
        self._kernel = kernel
        self._index = kernel.device.index or 0
        self._arguments = tuple(arguments)  # kept alive: the addresses below point to them
        self._addresses = (ctypes.c_void_p * len(self._arguments))(*map(ctypes.addressof, self._arguments))
        self._parameters = ctypes.c_void_p(ctypes.addressof(self._addresses))
        function = int(kernel.driver_kernel.handle)  # a CUkernel, which the driver takes for a CUfunction
        grid = (blocks, 1, 1, threads, 1, 1, kernel.shared_bytes)
        self._enqueue = partial(driver().launch, ctypes.c_void_p(function), *map(ctypes.c_uint, grid))

    def __call__(self) -> None:
        """Enqueue the launch on the current stream of the kernel's device; KernelError if the driver refuses."""
        stream = current_stream(self._index)
        if self._enqueue(stream, self._parameters, None):
            self._again(stream)

    def _again(self, stream: int) -> None:
        kernel = self._kernel
        try:
            driver().again(f"'{kernel.name}'", kernel.device, lambda: self._enqueue(stream, self._parameters, None))
        except DriverError as error:
            raise KernelError(str(error)) from None
