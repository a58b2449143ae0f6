"""benchmarks/h200.sh, as far as it goes without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from test.sources import ROOT

LIMIT = 1200  # seconds; about one minute where nothing else runs


def run(work: Path, *steps: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PRESET": "pi05_tiny",
        "DEVICE": "cpu",
        "WORK": str(work / "work"),
        "OUT": str(work / "out"),
        "WHEELS": str(work / "none"),
        "OMP_NUM_THREADS": "1",  # so small a model only waits for its own threads where others are busy
        **variables,
    }
    command = ["bash", str(ROOT / "benchmarks" / "h200.sh"), *steps]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)


def test_the_checkpoint_is_made_once(tmp_path: Path) -> None:
    first, second = run(tmp_path, "checkpoint"), run(tmp_path, "checkpoint")
    assert first.returncode == second.returncode == 0, first.stderr
    assert "== flashrt make-checkpoint: exit 0" in first.stdout
    assert "make-checkpoint" not in second.stdout


def test_results_are_handed_over_also_when_a_step_fails(tmp_path: Path) -> None:
    results = tmp_path / "work" / "results"
    results.mkdir(parents=True)
    (results / "h200_pi05.json").write_text("[]")
    found = run(tmp_path, "roofline", "checkpoint")
    assert found.returncode == 1
    assert "has no result of 2 views" in found.stderr
    assert found.stderr.endswith("== failed: roofline\n")
    assert (tmp_path / "out" / "h200_pi05.json").read_text() == "[]"
    assert (tmp_path / "work" / "checkpoint" / "config.json").is_file()  # the step behind it ran


def test_an_unknown_step_is_refused(tmp_path: Path) -> None:
    found = run(tmp_path, "checkpoint", "everything")
    assert found.returncode == 2
    assert found.stderr.startswith("unknown step 'everything'; there are: accelerate bench capsules checkpoint full ")
    assert not (tmp_path / "work" / "checkpoint").exists()


def test_tiers_are_calibrated_gated_timed_together_and_drawn(tmp_path: Path) -> None:
    quick = {"TOKENS": "111", "PHOTOGRAPHS": "2", "BENCH": "--rounds 1 --calls 1 --turn-seconds 0.01"}
    found = run(tmp_path, "checkpoint", "tiers", TIERS="8-bit 4-bit", CASES="2x10,3x50", **quick)
    assert found.returncode == 0, found.stderr
    out = tmp_path / "out"
    for tier in ("8-bit", "4-bit"):
        report = json.loads((out / f"h200_pi05_{tier}.json").read_text())
        assert report["failures"] == []
        assert report["observations"] == 2
        assert (out / f"h200_pi05_{tier}.safetensors.fidelity.json").is_file()
    results = json.loads((out / "h200_pi05.json").read_text())
    assert [(r["tier"], r["views"], r["chunk"]) for r in results] == [
        ("32-bit", 2, 10),
        ("8-bit", 2, 10),
        ("4-bit", 2, 10),
    ]
    assert [r["agreement"] is not None for r in results] == [False, True, True]
    assert all(set(r["pairs"]) == {"reuse", "overlap"} for r in results)
    assert "2 of 3 results" in found.stdout
    assert (out / "h200_pi05_tiers.png").read_bytes().startswith(b"\x89PNG")
