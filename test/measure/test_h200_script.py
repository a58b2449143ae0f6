"""benchmarks/h200.sh, as far as it goes without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from test.sources import ROOT


def run(work: Path, *steps: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PRESET": "pi05_tiny",
        "DEVICE": "cpu",
        "WORK": str(work / "work"),
        "OUT": str(work / "out"),
        "WHEELS": str(work / "none"),
    }
    command = ["bash", str(ROOT / "benchmarks" / "h200.sh"), *steps]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_the_checkpoint_is_made_once(tmp_path: Path) -> None:
    first, second = run(tmp_path, "checkpoint"), run(tmp_path, "checkpoint")
    assert first.returncode == second.returncode == 0, first.stderr
    assert "== flashrt make-checkpoint: exit 0" in first.stdout
    assert "make-checkpoint" not in second.stdout


def test_results_are_handed_over_also_when_a_step_fails(tmp_path: Path) -> None:
    results = tmp_path / "work" / "results"
    results.mkdir(parents=True)
    (results / "h200_pi05.json").write_text("[]")
    found = run(tmp_path, "roofline")
    assert found.returncode == 2
    assert "has no result of 2 views" in found.stderr
    assert (tmp_path / "out" / "h200_pi05.json").read_text() == "[]"


def test_an_unknown_step_is_refused(tmp_path: Path) -> None:
    found = run(tmp_path, "everything")
    assert found.returncode == 2
    assert "there are: checkpoint verify profile bench lerobot full roofline" in found.stderr
