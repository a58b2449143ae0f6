"""Registers that the warps of a kernel hand to each other."""

from __future__ import annotations

from functools import lru_cache

from .compiler import KernelSource, compiled, compiler_version
from .cubin import registers_of
from .errors import KernelError


@lru_cache(maxsize=256)
def demand_registers(source: KernelSource, architecture: str, registers: int) -> None:
    """KernelError if the warps of this kernel would wait for ever for registers that others were to give back.

    How many there are to give follows from what a launch gives to each thread, which the compiler decides.

    Args:
        source: of a kernel that hands registers over.
        architecture: that it runs on ("sm_90a").
        registers: of a thread at its launch, which its numbers are made for.
    """
    found = registers_of(compiled(source, architecture))
    if found not in (None, registers):
        raise KernelError(
            f"{source.name}: NVRTC {compiler_version()} gives each thread {found} registers, its warps count on "
            f"{registers}; install nvidia-cuda-nvrtc==13.0.88"
        )
