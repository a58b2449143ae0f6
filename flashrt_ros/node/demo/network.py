"""A ROS graph of the demo's own: a domain that nobody else uses, this machine only, room for images.

Imports no ROS.
"""

from __future__ import annotations

import fcntl
import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import DemoError

# Ports of domains above 101 run into the range that Linux gives to outgoing connections.
DOMAINS = range(1, 102)


@contextmanager
def own_domain() -> Iterator[int]:
    """Yield a ROS domain id that no other demo or test of this user holds, for as long as the block runs."""
    for domain in random.sample(DOMAINS, len(DOMAINS)):
        path = Path(tempfile.gettempdir()) / f"flashrt_ros_domain_{domain}.lock"
        try:
            file = path.open("a")
        except PermissionError:  # another user's
            continue
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield domain
            return
    raise DemoError(
        f"all ROS domains from {DOMAINS[0]} to {DOMAINS[-1]} are in use by demos or tests; wait for one to end"
    )


def ros_environment(domain: int, profile: Path, logs: Path) -> dict[str, str]:
    """Environment variables of every process of the demo.

    Args:
        domain: ROS domain id.
        profile: XML profile of Fast DDS with a shared-memory segment that holds images.
        logs: folder of ROS's own logs.
    """
    return {
        "ROS_DOMAIN_ID": str(domain),
        "ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST",
        "ROS_LOG_DIR": str(logs.absolute()),
        "ROS_STATIC_PEERS": "",
        "RMW_IMPLEMENTATION": "rmw_fastrtps_cpp",
        "FASTRTPS_DEFAULT_PROFILES_FILE": str(profile.absolute()),
        "FASTDDS_DEFAULT_PROFILES_FILE": str(profile.absolute()),
    }


def child_environment(ros: dict[str, str]) -> dict[str, str]:
    """The environment of a child process: ours, `ros`, and settings that only count from its start."""
    # Image buffers of a megabyte are otherwise mapped and returned to the kernel with every frame.
    malloc = {
        "MALLOC_MMAP_THRESHOLD_": "1000000000",
        "MALLOC_TRIM_THRESHOLD_": "1000000000",
        "MALLOC_TOP_PAD_": "67108864",
    }
    return {**os.environ, **ros, **malloc, "PYTHONUNBUFFERED": "1"}
