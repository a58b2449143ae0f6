"""What every result records beside its figures: the machine, the versions, and how samples are summed up."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

PACKAGES = ("flashrt_ros", "torch", "triton", "cuda-core", "lerobot", "transformers", "numpy", "nvidia-cudnn-cu13")


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p95 and p99 of `values`, rounded to four significant digits."""
    points = np.percentile(values, (50, 95, 99))
    return {name: significant(point) for name, point in zip(("p50", "p95", "p99"), points, strict=True)}


def significant(value: float, digits: int = 4) -> float:
    """`value` rounded to `digits` significant digits."""
    return float(f"{value:.{digits}g}")


def machine() -> dict[str, Any]:
    """Processor, usable cores, memory, operating system, and the GPU with its driver if there is one."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    facts: dict[str, Any] = {
        "cpu": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "os": platform.platform(),
    }
    return facts | (_gpu() if torch.cuda.is_available() else {})


def _gpu() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "compute_capability": f"{properties.major}.{properties.minor}",
    }


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Python and the packages that decide the figures; a package that is absent is left out."""
    found = {"python": sys.version.split()[0]}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def now() -> str:
    """The date and time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
