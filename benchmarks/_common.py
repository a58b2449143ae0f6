"""What every benchmark records beside its figures: the machine, the versions, the protocol."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("flashrt_ros", "torch", "numpy", "ros-rclpy", "opencv-python-headless")


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p95, p99 and the largest of `values`, rounded to four significant digits."""
    points = [*np.percentile(values, (50, 95, 99)), max(values)]
    names = ("p50", "p95", "p99", "max")
    return {name: float(f"{value:.4g}") for name, value in zip(names, points, strict=True)}


def machine() -> dict[str, Any]:
    """Processor, usable cores, memory and operating system."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "os": platform.platform(),
    }


def versions() -> dict[str, str]:
    """Python and the packages that decide the figures; a package that is absent is left out."""
    found = {"python": sys.version.split()[0]}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def write_result(name: str, result: Mapping[str, Any], protocol: str) -> Path:
    """Write `result` with its circumstances to results/`name`.json, print it, and return the path."""
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    circumstances = {"date": date, "machine": machine(), "versions": versions(), "protocol": protocol}
    text = json.dumps({**result, **circumstances}, indent=2)
    path.write_text(text + "\n")
    print(text)
    return path
