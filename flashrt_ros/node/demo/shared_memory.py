"""Fast DDS keeps its segments in /dev/shm; a process that was killed leaves them there. Imports no ROS."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

FOLDER = Path("/dev/shm")
_PREFIXES = ("fastrtps_", "sem.fastrtps_", "fastdds_", "sem.fastdds_")


def mapped_segments(pid: int) -> set[str]:
    """Names of the Fast DDS files that process `pid` has mapped now; none if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    names = {line.rsplit("/", 1)[1] for line in lines if f" {FOLDER}/" in line}
    return {name for name in names if name.startswith(_PREFIXES)}


def remove_segments(names: Iterable[str], disregard: int = 0) -> list[str]:
    """Remove the files of `names` that no process maps any more, with their lock files; returns what was removed.

    Args:
        names: of segments.
        disregard: a process that has left the graph: Fast DDS keeps the segments of others mapped all the same.
    """
    pids = {int(path.name) for path in Path("/proc").glob("[0-9]*")} - {disregard}
    in_use = set().union(*(mapped_segments(pid) for pid in pids))
    removed = []
    for name in sorted(set(names) - in_use):
        for path in (FOLDER / name, FOLDER / f"{name}_el", FOLDER / f"sem.{name}_mutex"):
            if path.exists():
                path.unlink(missing_ok=True)
                removed.append(path.name)
    return removed
