"""Which device a session may use, and the reason why not, in one line."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from .driver import LIBRARY
from .errors import DeviceError
from .windows import is_integrated

OLDEST = (8, 7)
"""Lowest compute capability that a session runs on: Jetson Orin's."""
_MEMORY_INFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class CudaFacts:
    """What decides whether GPU number `index` can be used.

    Attributes:
        built_for: CUDA version that torch was built for ("13.0"), None for a build without CUDA.
        driver: CUDA version that the driver supports, as (major, minor); None if there is no driver.
        count: GPUs that torch sees.
        capability: compute capability of that GPU; None if there is no such GPU.
    """

    built_for: str | None
    driver: tuple[int, int] | None
    count: int
    capability: tuple[int, int] | None


def resolve_device(name: str) -> torch.device:
    """The torch device called `name` ("cpu", "cuda", "cuda:1"); DeviceError if a session cannot run there."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise DeviceError(f"unknown device '{name}'; use 'cpu', 'cuda' or 'cuda:N'") from None
    if device.type not in ("cpu", "cuda"):
        raise DeviceError(f"device '{name}' is not supported; use 'cpu', 'cuda' or 'cuda:N'")
    if device.type == "cuda":
        index = device.index or 0
        reason = unusable(index, cuda_facts(index))
        if reason:
            raise DeviceError(f"device '{name}' was asked for, but {reason}, or set device to 'cpu'")
    return device


def unusable(index: int, facts: CudaFacts) -> str:
    """Why GPU number `index` cannot be used, and what to do; empty if it can."""
    if facts.built_for is None:
        return f"this torch ({torch.__version__}) was built without CUDA; install a CUDA build of torch"
    if facts.driver is None:
        return f"there is no NVIDIA driver ({LIBRARY} cannot be loaded); install one, give a container the GPU"
    if facts.driver[0] < int(facts.built_for.split(".", maxsplit=1)[0]):
        return (
            f"the NVIDIA driver is too old: it supports CUDA {_dotted(facts.driver)}, and this torch "
            f"({torch.__version__}) needs {facts.built_for}; update the driver"
        )
    if index >= facts.count:
        return f"torch sees {facts.count} GPU(s); check `nvidia-smi` and CUDA_VISIBLE_DEVICES"
    if facts.capability is not None and facts.capability < OLDEST:
        return (
            f"that GPU is too old: compute capability {_dotted(facts.capability)}, expected {_dotted(OLDEST)} or "
            "above; use a newer GPU"
        )
    return ""


def cuda_facts(index: int) -> CudaFacts:
    """The facts of this machine about GPU number `index`."""
    built_for, driver = torch.version.cuda, driver_version()
    count = torch.cuda.device_count() if built_for is not None and driver is not None else 0
    capability = torch.cuda.get_device_capability(index) if index < count else None
    return CudaFacts(built_for, driver, count, capability)


def driver_version() -> tuple[int, int] | None:
    """CUDA version that the NVIDIA driver supports, as (major, minor); None if there is no driver."""
    try:
        library = ctypes.CDLL(LIBRARY)
        version = ctypes.c_int()
        status = library.cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if status else (version.value // 1000, version.value % 1000 // 10)


def require_memory(device: torch.device, nbytes: int, purpose: str) -> None:
    """Raise DeviceError unless about `nbytes` are free on `device`; nothing is asked of a CPU."""
    if device.type == "cpu":
        return
    free = free_bytes(device)
    if free < nbytes:
        raise DeviceError(
            f"{purpose} takes about {_gib(nbytes)} on '{device}', which has {_gib(free)} free of "
            f"{_gib(torch.cuda.get_device_properties(device).total_memory)}; end other processes there (`nvidia-smi`), "
            "or configure fewer views, a shorter chunk or a smaller max_pixels"
        )


def free_bytes(device: torch.device) -> int:
    """Bytes that can be allocated on GPU `device` now.

    Where it shares the host's memory, pages that only cache files count as free, which CUDA does not do.
    """
    free: int = torch.cuda.mem_get_info(device)[0]
    if is_integrated(device):
        lines = _MEMORY_INFO.read_text().splitlines()
        free = max(free, *(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")))
    return free


@contextmanager
def memory_refusals(device: torch.device) -> Iterator[None]:
    """Running out of `device`'s memory in this block is a DeviceError of one line."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        first = str(error).split(". ", maxsplit=1)[0].splitlines()[0]
        raise DeviceError(f"'{device}' ran out of memory ({first}); end other processes there, or use less") from None


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"
