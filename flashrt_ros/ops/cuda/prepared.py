"""Launches that are prepared once: for what must not wait for Python."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...engine.driver import current_stream, driver
from ...engine.errors import DriverError
from .errors import KernelError
from .kernel import Kernel

if TYPE_CHECKING:
    Argument = ctypes._SimpleCData[Any] | ctypes.Structure


class LaunchConfig(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


class PreparedLaunch:
    """One launch with its grid and its arguments in place: a call hands three addresses to the driver, and no more.

    They are kept as `byref` makes them. That is what ctypes makes of any argument first, by way of its type.

    Args:
        kernel: what to launch.
        blocks: thread blocks, in one dimension.
        threads: of a block.
        arguments: the kernel's arguments in their order, passed by value. They are read at each call, so changing one's
            content changes the next launch.
    """

    __slots__ = (
        "_arguments",
        "_at_config",
        "_config",
        "_enqueue",
        "_function",
        "_index",
        "_kernel",
        "_stream",
        "_values",
    )

    def __init__(self, kernel: Kernel, blocks: int, threads: int, arguments: Sequence[Argument]) -> None:
        self._kernel = kernel
        self._index = kernel.device.index or 0
        self._values = tuple(arguments)  # kept alive: the addresses point to them
        self._arguments = ctypes.byref((ctypes.c_void_p * len(self._values))(*map(ctypes.addressof, self._values)))
        # A CUkernel, which the driver takes for a CUfunction: an address of the driver's, where nothing is read here.
        self._function = ctypes.byref(ctypes.c_byte.from_address(int(kernel.driver_kernel.handle)))
        self._config = LaunchConfig((blocks, 1, 1), (threads, 1, 1), kernel.shared_bytes)
        self._at_config = ctypes.byref(self._config)
        self._stream = 0  # what the configuration says
        self._enqueue = driver().launch

    def __call__(self) -> None:
        """Enqueue the launch on the current stream of the kernel's device; KernelError if the driver refuses."""
        stream = current_stream(self._index)
        if stream != self._stream:
            self._config.stream = self._stream = stream
        if self._enqueue(self._at_config, self._function, self._arguments, None):
            self._again()

    def _again(self) -> None:
        kernel = self._kernel
        try:
            driver().again(
                f"'{kernel.name}'",
                kernel.device,
                lambda: self._enqueue(self._at_config, self._function, self._arguments, None),
            )
        except DriverError as error:
            raise KernelError(str(error)) from None
