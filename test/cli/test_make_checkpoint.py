"""`flashrt make-checkpoint`."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashrt_ros.cli import main
from flashrt_ros.measure.pi05.checkpoint import default_settings
from flashrt_ros.policies.pi05 import build


def test_it_writes_a_folder_that_the_policy_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "checkpoint"
    arguments = ["--preset", "pi05_tiny", "--views", "2", "--chunk", "6", "--dtype", "bfloat16"]
    assert main(["make-checkpoint", "--out", str(out), *arguments]) == 0
    printed = capsys.readouterr()
    assert "of bfloat16 weights, seed 0" in printed.out
    assert "100 %" in printed.err
    policy = build({"preset": "pi05_tiny", **default_settings(out), "checkpoint": str(out), "relative_actions": False})
    assert (policy.views, policy.chunk) == (("front", "left_wrist"), 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "pi06"], "unknown preset 'pi06'; there are: pi05, pi05_tiny"),
        (["--views", "4"], "--views is 4, expected 1 to 3"),
        (["--preset", "pi05_tiny", "--chunk", "0"], "setting 'chunk' is 0"),
    ],
)
def test_mistakes_are_told_in_one_line(
    tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["make-checkpoint", "--out", str(tmp_path / "x"), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["make-checkpoint", "--out", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
