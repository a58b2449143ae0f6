"""Power, clocks and temperature while something is measured, as `nvidia-smi` reports them."""

from __future__ import annotations

import shutil
import subprocess
from types import TracebackType
from typing import Any

_FIELDS = {
    "power.draw": "power_w",
    "clocks.sm": "sm_mhz",
    "clocks.mem": "memory_mhz",
    "temperature.gpu": "temperature_c",
    "utilization.gpu": "utilisation_percent",
}
_INTERVAL_MS = 100


class GpuWatch:
    """Context manager that samples the GPU until it is left; `seen()` then sums up.

    On a machine without `nvidia-smi` it does nothing and `seen()` is None.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._output = ""

    def __enter__(self) -> GpuWatch:
        program = shutil.which("nvidia-smi")
        if program is not None:
            query = f"--query-gpu={','.join(_FIELDS)}"
            command = [program, query, "--format=csv,noheader,nounits", f"--loop-ms={_INTERVAL_MS}", "--id=0"]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.terminate()
            self._output, _ = self._process.communicate()

    def seen(self) -> dict[str, Any] | None:
        """{"power_w": {"min", "median", "max"}, …, "samples"}; None without samples."""
        return summed_up(self._output)


def summed_up(output: str) -> dict[str, Any] | None:
    """Smallest, median and largest value of each column of nvidia-smi's CSV; values that it does not know are left out.

    An idle GPU at the beginning and the end is part of what was seen.
    """
    columns: dict[str, list[float]] = {name: [] for name in _FIELDS.values()}
    count = 0
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(columns):
            continue  # the last line can be cut off
        count += 1
        for name, cell in zip(columns, cells, strict=True):
            try:
                columns[name].append(float(cell))
            except ValueError:
                continue
    if not count:
        return None
    figures: dict[str, Any] = {name: _spread(values) for name, values in columns.items() if values}
    return figures | {"samples": count}


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"min": ordered[0], "median": ordered[len(ordered) // 2], "max": ordered[-1]}
