"""What every benchmark records beside its figures: the machine, the versions, the protocol."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashrt_ros.measure import circumstances
from flashrt_ros.measure.circumstances import machine, now, significant

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("flashrt_ros", "torch", "cuda-core", "numpy", "ros-rclpy", "opencv-python-headless")


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p95, p99 and the largest of `values`, rounded to four significant digits."""
    return {**circumstances.percentiles(values), "max": significant(max(values))}


def versions() -> dict[str, str]:
    """Python and the packages that decide the figures; a package that is absent is left out."""
    return circumstances.versions(_PACKAGES)


def write_result(name: str, result: Mapping[str, Any], protocol: str) -> Path:
    """Write `result` with its circumstances to results/`name`.json, print it, and return the path."""
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    found = {"date": now(), "machine": machine(), "versions": versions(), "protocol": protocol}
    text = json.dumps({**result, **found}, indent=2)
    path.write_text(text + "\n")
    print(text)
    return path
