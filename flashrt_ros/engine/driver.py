"""The few driver calls of the hot path, made through ctypes.

Whoever goes on after a wait of some milliseconds finds little of the code and data that comes next in its caches. A
call then costs what it touches, not what it computes, and a binding that looks up, converts and checks touches more
than the driver does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache

import torch

from .errors import DriverError

LIBRARY = "libcuda.so.1"

DriverCall = Callable[..., int]
"""One driver function; returns its CUresult, 0 if all went well."""


class Driver:
    """The driver's functions that enqueue. They work in the context that is current on the calling thread."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self.upload = _function(library, "cuMemcpyHtoDAsync_v2", ctypes.c_uint64, pointer, size, pointer)
        self.download = _function(library, "cuMemcpyDtoHAsync_v2", pointer, ctypes.c_uint64, size, pointer)
        self.record = _function(library, "cuEventRecord", pointer, pointer)
        self.finish = _function(library, "cuStreamSynchronize", pointer)
        self.launch: DriverCall = library.cuLaunchKernelEx
        """Takes four addresses, as `ctypes.byref` makes them: no types are declared, which would convert each anew."""
        self._name = _function(library, "cuGetErrorName", ctypes.c_int, pointer)

    def name_of(self, result: int) -> str:
        """What the driver calls `result`, such as "CUDA_ERROR_INVALID_VALUE"."""
        text = ctypes.c_char_p()
        unknown = self._name(result, ctypes.byref(text)) or text.value is None
        return f"CUresult {result}" if unknown else str(text.value, "ascii")  # type: ignore[arg-type]

    def again(self, what: str, device: torch.device, call: Callable[[], int]) -> None:
        """Repeat a call that failed, with the context of `device` current: a thread that has used no CUDA yet has none.

        Raises DriverError, with `what` and the driver's reason, if it fails again.
        """
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # the cheapest call that surely makes it current
            result = call()
        if result:
            raise DriverError(f"the driver refuses {what} on '{device}' ({self.name_of(result)})")


def _function(library: ctypes.CDLL, name: str, *arguments: type) -> DriverCall:
    function = getattr(library, name)
    function.argtypes, function.restype = arguments, ctypes.c_int
    found: DriverCall = function
    return found


@lru_cache(maxsize=1)
def driver() -> Driver:
    """The driver of this machine; DriverError if there is none."""
    try:
        return Driver(ctypes.CDLL(LIBRARY))
    except (OSError, AttributeError) as error:
        raise DriverError(f"{LIBRARY} cannot be used ({error}); install an NVIDIA driver") from None


def _no_stream(index: int) -> int:
    raise DriverError(f"this build of PyTorch has no CUDA, so GPU {index} has no stream; install one that has")


current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _no_stream)
"""Handle of torch's current stream on the GPU of this number. torch's own function, without one of ours around it."""
