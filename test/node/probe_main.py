"""The node's own `main`, in a process that also has the test's policies."""

from __future__ import annotations

import sys
from pathlib import Path

import flashrt_ros.policies
from flashrt_ros.node.main import main

if __name__ == "__main__":
    flashrt_ros.policies.__path__.append(str(Path(__file__).parent / "policies"))
    sys.exit(main())
