"""Writes requirements/constraints.txt: the version of every package that pip installed in this environment.

Run it after a change of the pins in pyproject.toml, in an environment made without the old constraints:
`: > requirements/constraints.txt && make distclean venv && .venv/bin/python scripts/lock.py`.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parent.parent / "requirements" / "constraints.txt"
HEADER = """\
# Every package of a complete .venv, at the version it was tested with. Written by scripts/lock.py; what we
# ask for ourselves, and why, is in pyproject.toml and docs/dependencies.md.
"""
# The environment's own pip is not ours to choose, and this package is what is being installed.
NOT_OURS = {"pip", "flashrt-ros"}


def installed() -> dict[str, str]:
    """Normalised name -> version of what pip installed.

    The ROS wheels carry further metadata of their Python parts (`rclpy` in `ros-rclpy`). Those are no
    packages of their own, and have no INSTALLER file.
    """
    packages = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"].lower().replace("_", "-")
        if distribution.read_text("INSTALLER") is not None and name not in NOT_OURS:
            # 2.13.0+cpu is a build of 2.13.0; which one, the machine decides.
            packages[name] = distribution.version.partition("+")[0]
    return packages


def main() -> None:
    """Write the file."""
    lines = (f"{name}=={version}\n" for name, version in sorted(installed().items()))
    CONSTRAINTS.write_text(HEADER + "".join(lines))


if __name__ == "__main__":
    main()
