"""Compiles kernel sources with NVRTC, and keeps the results on disk.

Nothing here needs a GPU: a machine without one compiles for any architecture.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

from .errors import KernelError

CACHE_VERSION = 1  # raise it when the layout of a key or of a cached file changes
_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)
_FLAGS = (
    "--std=c++17", "--ftz=false", "--prec-div=true", "--prec-sqrt=true",
    "--device-as-default-execution-space",  # generic lambdas: newer compilers need no telling, 13.0 does
)  # fmt: skip


@dataclass(frozen=True)
class KernelSource:
    """One `.cu` file with its compile-time sizes: `KernelSource("norms", {"COLS": 1152})`."""

    name: str
    defines: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "defines", MappingProxyType(dict(sorted(self.defines.items()))))

    def __hash__(self) -> int:
        return hash((self.name, tuple(self.defines.items())))

    def __str__(self) -> str:
        sizes = ", ".join(f"{key}={value}" for key, value in self.defines.items())
        return f"{self.name}.cu ({sizes})" if sizes else f"{self.name}.cu"


@lru_cache(maxsize=1)
def kernel_folder() -> Path:
    """The folder of `.cu` sources: beside the package in a checkout, `share/flashrt_ros/kernels` once installed."""
    prefixes = [*os.environ.get("AMENT_PREFIX_PATH", "").split(os.pathsep), sys.prefix]
    candidates = [Path(__file__).parents[3] / "kernels"]
    candidates += [Path(prefix) / "share" / "flashrt_ros" / "kernels" for prefix in prefixes if prefix]
    for candidate in candidates:
        if (candidate / "common.cuh").is_file():
            return candidate
    raise KernelError(
        f"no kernel sources in {', '.join(map(str, candidates))}; install flashrt_ros completely (colcon or pip)"
    )


def full_text(source: KernelSource) -> str:
    """The source with its own headers pasted in, so that one digest covers all that is compiled."""
    return _expanded(f"{source.name}.cu", set())


def _expanded(file_name: str, seen: set[str]) -> str:
    if file_name in seen:
        return ""
    seen.add(file_name)
    path = kernel_folder() / file_name
    if not path.is_file():
        raise KernelError(f"kernel source '{file_name}' is missing in {kernel_folder()}")
    text = path.read_text(encoding="utf-8").replace("#pragma once", "")
    return _INCLUDE.sub(lambda match: _expanded(match.group(1), seen), text)


def compiler_version() -> str:
    """ "major.minor" of the NVRTC that is installed; KernelError if there is none."""
    try:
        from cuda.bindings import nvrtc

        result, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError, OSError) as error:
        raise KernelError(
            f"NVRTC cannot be loaded ({str(error).splitlines()[0]}); "
            "install it with `pip install flashrt_ros[cuda]` (cuda-core, cuda-bindings, nvidia-cuda-nvrtc)"
        ) from None
    if int(result) != 0:
        raise KernelError(f"NVRTC does not tell its version: {result.name}")
    return f"{major}.{minor}"


def cache_key(source: KernelSource, architecture: str) -> str:
    """Hex digest over everything that decides the machine code."""
    parts = (str(CACHE_VERSION), full_text(source), *options_of(source, architecture), compiler_version())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def cache_folder() -> Path:
    """Where machine code is kept: `$FLASHRT_CACHE`, or `flashrt_ros/kernels` in the user's cache folder."""
    explicit = os.environ.get("FLASHRT_CACHE")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flashrt_ros" / "kernels"


def compiled(source: KernelSource, architecture: str) -> bytes:
    """Machine code (cubin) of `source` for `architecture` ("sm_90a"), from the cache if it is there.

    Raises KernelError with the compiler's log.
    """
    path = cache_folder() / f"{source.name}-{architecture}-{cache_key(source, architecture)[:32]}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        code = compile_source(source, architecture)
        _store(path, code)
        return code


def compile_source(source: KernelSource, architecture: str) -> bytes:
    """Compile without looking at the cache."""
    from cuda.bindings import nvrtc

    compiler_version()  # its message is the one a user can act on
    name = f"{source.name}.cu".encode()
    result, program = nvrtc.nvrtcCreateProgram(full_text(source).encode(), name, 0, [], [])
    if int(result) != 0:
        raise KernelError(f"NVRTC refuses {source}: {result.name}")
    try:
        options = [option.encode() for option in options_of(source, architecture)]
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if int(result) != 0:
            raise KernelError(f"{source} does not compile for {architecture}: {result.name}\n{_log(program)}")
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        code = bytearray(size)
        buffer = bytes(code)
        nvrtc.nvrtcGetCUBIN(program, buffer)
        return buffer
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def options_of(source: KernelSource, architecture: str) -> tuple[str, ...]:
    """What the compiler is told."""
    defines = tuple(f"-D{key}={value}" for key, value in source.defines.items())
    return (f"--gpu-architecture={architecture}", *_FLAGS, *defines)


def _log(program: object) -> str:
    from cuda.bindings import nvrtc

    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = b" " * size
    nvrtc.nvrtcGetProgramLog(program, log)
    return str(log.decode(errors="replace").strip("\0\n "))


def _store(path: Path, code: bytes) -> None:
    """Write to a file of another name first: another process must never read half of it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
        with os.fdopen(handle, "wb") as file:
            file.write(code)
        os.replace(temporary, path)
    except OSError:
        pass  # a read-only home only costs the compile time again at the next start
