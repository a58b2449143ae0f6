"""`flashrt roofline`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flashrt_ros.cli import main


def measured(path: Path, **changes: Any) -> Path:
    """A result file with one configuration on an H200."""
    result = {
        "views": 2,
        "chunk": 10,
        "tokens": 200,
        "tier": "16-bit",
        "stage_ms": {"vision": 1.2, "prefix": 4.0, "expert": 1.8},
        "machine": {"gpu": "NVIDIA H200"},
    }
    path.write_text(json.dumps([{**result, **changes}]))
    return path


def test_devices_that_nobody_measured_are_labelled_as_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["roofline"]) == 0
    titles = [
        line for line in capsys.readouterr().out.splitlines() if "data sheet" in line or "measured ceilings" in line
    ]
    assert [("PREDICTED" in line, line.split(":")[0]) for line in titles] == [
        (False, "NVIDIA H200"),
        (True, "Jetson Thor (T5000)"),
        (True, "GeForce RTX 5090"),
        (True, "Jetson AGX Orin 64 GB"),
    ]


def test_measured_times_give_shares_and_scale_the_predictions(tmp_path: Path) -> None:
    out = tmp_path / "roofline.json"
    assert main(["roofline", "--measured", str(measured(tmp_path / "r.json")), "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    h200 = report["devices"]["NVIDIA H200"]["tiers"]["16-bit"]
    assert h200["stages"]["prefix"]["share"] == pytest.approx(3.74 / 4.0, abs=0.005)
    assert h200["at_the_reached_share_ms"] == pytest.approx(1.2 + 4.0 + 1.8, abs=0.01)
    thor = report["devices"]["Jetson Thor (T5000)"]["tiers"]["16-bit"]
    assert thor["at_the_reached_share_ms"] > thor["floor_ms"] > 35


def test_a_tier_without_a_floor_of_its_own_is_passed_over(tmp_path: Path) -> None:
    path, out = tmp_path / "r.json", tmp_path / "roofline.json"
    measured(path)
    (wide,) = json.loads(path.read_text())
    path.write_text(json.dumps([wide, {**wide, "tier": "mine.yaml"}]))
    assert main(["roofline", "--measured", str(path), "--out", str(out)]) == 0
    assert list(json.loads(out.read_text())["reached"]) == ["16-bit"]


def test_the_fastest_of_several_results_says_what_share_is_reached(tmp_path: Path) -> None:
    path, out = tmp_path / "r.json", tmp_path / "roofline.json"
    measured(path)
    (wide,) = json.loads(path.read_text())
    slow = {stage: 3 * ms for stage, ms in wide["stage_ms"].items()}
    both = [{**wide, "tier": "4-bit-expert"}, {**wide, "tier": "4-bit", "stage_ms": slow}]
    path.write_text(json.dumps([wide, *both]))
    assert main(["roofline", "--measured", str(path), "--out", str(out)]) == 0
    together = json.loads(out.read_text())["reached"]["4-bit"]
    path.write_text(json.dumps([wide, both[0]]))
    assert main(["roofline", "--measured", str(path), "--out", str(out)]) == 0
    assert json.loads(out.read_text())["reached"]["4-bit"] == together


@pytest.mark.parametrize(
    "changes", [{"views": 3}, {"machine": {}}, {"machine": {"gpu": "NVIDIA L4"}}], ids=["views", "cpu", "other gpu"]
)
def test_a_result_that_does_not_fit_is_refused(
    tmp_path: Path, changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["roofline", "--measured", str(measured(tmp_path / "r.json", **changes))]) == 2
    assert "has no result of 2 views, chunk 10, 200 tokens" in capsys.readouterr().err


def test_an_unknown_device_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["roofline", "--device", "tpu"]) == 2
    assert "no ceilings are known for 'tpu'" in capsys.readouterr().err
