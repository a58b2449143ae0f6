"""The lists of wheels for a GPU machine without a network, and the script that fetches them."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from test.sources import ROOT

OFFLINE = ROOT / "requirements" / "offline"


def pins(text: str) -> dict[str, str]:
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return dict(line.split("==") for line in lines if line)


@pytest.mark.parametrize("path", sorted(OFFLINE.glob("*.txt")), ids=lambda path: path.stem)
def test_every_wheel_is_pinned_once(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert lines == sorted(set(lines))
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line) for line in lines)


def test_ros_is_that_of_the_tests_and_complete() -> None:
    listed, locked = (
        pins((OFFLINE / "ros.txt").read_text()),
        pins((ROOT / "requirements" / "constraints.txt").read_text()),
    )
    assert {name: locked.get(name) for name in listed} == listed
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    needed = {re.split(r"[\[=<>~ ]", item)[0] for item in asked if item.startswith("ros-")}
    assert needed <= set(listed)


def test_something_else_is_refused_with_what_there_is() -> None:
    script = ROOT / "scripts" / "offline_wheels.sh"
    result = subprocess.run(["bash", str(script), "everything"], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.strip().endswith("unknown 'everything'; there are: lerobot accelerate ros")
    assert "FOR" in result.stderr
