"""Loaded kernels: found by source, sizes and device, launched on torch's current stream."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .boundary import demand_device
from .compiler import KernelSource, compiled
from .errors import KernelError

if TYPE_CHECKING:
    from cuda.core import Kernel as DriverKernel

Dim = int | tuple[int, ...]
Argument = Tensor | int | float | None
"""A tensor is passed as its address (None: a null pointer), an int as C int, a float as C float."""

HOPPER = "sm_90a"  # as `architecture` calls it; alone in having warpgroup instructions
_ARCHITECTURE_SPECIFIC = (9, 0)  # from this compute capability on, kernels use instructions of one architecture ("a")


def architecture(device: torch.device) -> str:
    """The name that NVRTC compiles for on `device`, such as "sm_90a"."""
    capability = torch.cuda.get_device_capability(device)
    suffix = "a" if capability >= _ARCHITECTURE_SPECIFIC else ""
    return f"sm_{capability[0]}{capability[1]}{suffix}"


class Kernel:
    """One function of one compiled source, on one device.

    Args:
        source: file and sizes.
        function: its `extern "C"` name.
        shared_bytes: dynamic shared memory of every launch.
        device: where it will run.
    """

    def __init__(self, source: KernelSource, function: str, device: torch.device, shared_bytes: int = 0) -> None:
        self.name = function
        self.device = device
        self.shared_bytes = shared_bytes
        with torch.cuda.device(device):
            loaded = _load(source, architecture(device), device.index or 0)
            self._kernel = loaded.code.get_kernel(function)
            if shared_bytes > loaded.shared.get(function, 0):
                self._allow_shared(shared_bytes)
                loaded.shared[function] = shared_bytes

    def _allow_shared(self, nbytes: int) -> None:
        from cuda.bindings import driver

        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (result,) = driver.cuKernelSetAttribute(attribute, nbytes, self._kernel.handle, self.device.index or 0)
        if int(result) != 0:
            raise KernelError(f"{self.name}: this GPU gives a block no {nbytes} bytes of shared memory ({result.name})")

    @property
    def driver_kernel(self) -> DriverKernel:
        """The loaded function, with its attributes and occupancy queries."""
        return self._kernel

    def resident_clusters(self, clusters: int, blocks: int, threads: int) -> int:
        """How many of `clusters` clusters the device runs at once, when it runs nothing else."""
        from cuda.bindings import driver

        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = blocks, 1, 1
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = clusters * blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes, config.attrs, config.numAttrs = self.shared_bytes, [attribute], 1
        with torch.cuda.device(self.device):
            result, function = driver.cuKernelGetFunction(self._kernel.handle)
            if int(result) == 0:
                result, count = driver.cuOccupancyMaxActiveClusters(function, config)
        if int(result) != 0:
            raise KernelError(f"{self.name}: clusters of {blocks} blocks are refused by the driver ({result.name})")
        return min(clusters, int(count))

    def launch(
        self, grid: Dim, block: int, *arguments: Argument, cluster: int | None = None, overlap: bool = False
    ) -> None:
        """Enqueue one launch; it is recorded when the stream is being captured.

        With `cluster`, `grid` counts clusters of so many blocks; `overlap` lets the launch begin before the kernel in
        front of it ends (the source must have been compiled with OVERLAP=1, or it would not wait).
        """
        from cuda.core import LaunchConfig, launch

        config = LaunchConfig(
            grid=grid,
            block=block,
            shmem_size=self.shared_bytes,
            cluster=cluster,
            programmatic_stream_serialization=overlap,
        )
        values = [
            converted(argument, f"{self.name}: argument {i}", self.device) for i, argument in enumerate(arguments)
        ]
        launch(_current_stream(self.device), config, self._kernel, *values)


def converted(argument: Argument, what: str, device: torch.device) -> Any:
    """An argument as the driver takes it; KernelError, calling it `what`, for a tensor that is not on `device`."""
    if isinstance(argument, Tensor):
        demand_device(what, argument, device)
        return argument.data_ptr()
    if argument is None:
        return 0
    return ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_int(argument)


def _current_stream(device: torch.device) -> Any:
    return _stream(torch.cuda.current_stream(device).cuda_stream)


@lru_cache(maxsize=64)
def _stream(handle: int) -> Any:
    from cuda.core import Stream

    return Stream.from_handle(handle)


@dataclass(frozen=True)
class _Loaded:
    """A compiled source on a device.

    Attributes:
        code: cuda.core's object code.
        shared: most bytes of dynamic shared memory that a launch of each function may have. They hold for all of its
            launches, those of larger ones that were prepared earlier too: so they only grow.
    """

    code: Any
    shared: dict[str, int] = field(default_factory=dict)


@lru_cache(maxsize=256)
def _load(source: KernelSource, arch: str, device_index: int) -> _Loaded:
    from cuda.core import Device, ObjectCode

    Device(device_index).set_current()
    return _Loaded(ObjectCode.from_cubin(compiled(source, arch), name=str(source)))


@lru_cache(maxsize=256)
def kernel(source: KernelSource, function: str, device: torch.device, shared_bytes: int = 0) -> Kernel:
    """The kernel `function` of `source`, loaded once for each device."""
    return Kernel(source, function, device, shared_bytes)
