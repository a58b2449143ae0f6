"""Runs a module's `main()` as a child that cannot outlive its parent, not even one that was killed.

Run: `python -m flashrt_ros.node.demo.child PARENT_PID MODULE [ARGUMENT...]`. Imports no ROS.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def die_with(parent: int) -> None:
    """Ask the kernel for a SIGTERM when process `parent` ends; exit at once if it has ended already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        sys.exit(1)


def main() -> None:
    """Bind to the parent, then run the module's `main()` with the arguments as the process's own."""
    parent, module, *arguments = sys.argv[1:]
    die_with(int(parent))
    sys.argv = [module, *arguments]
    sys.exit(importlib.import_module(module).main())


if __name__ == "__main__":
    main()
