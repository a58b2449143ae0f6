"""Finding the package's data files, in a checkout and in an installation. Imports no ROS."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from .errors import DemoError

_CHECKOUT = Path(__file__).resolve().parents[3]


def share_file(name: str) -> Path:
    """The path of a data file, for example `config/pi05_tiny.yaml`: the checkout's own, else an installed one.

    Raises:
        DemoError: neither the checkout nor an installation has it.
    """
    prefixes = [*os.environ.get("AMENT_PREFIX_PATH", "").split(os.pathsep), sys.prefix]
    folders = [_CHECKOUT, *(Path(prefix) / "share" / "flashrt_ros" for prefix in prefixes if prefix)]
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    raise DemoError(
        f"cannot find {name} in any of: {', '.join(map(str, folders))}; source the workspace's setup file, or run "
        "from a checkout with `make demo`"
    )
