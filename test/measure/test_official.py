"""Against LeRobot itself where it is installed (Python 3.12, `pip install 'lerobot[pi]==0.6.1'`); skipped elsewhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flashrt_ros.cli import main
from flashrt_ros.measure.errors import MeasureError
from flashrt_ros.measure.pi05.official import Official, lerobot_version
from flashrt_ros.policies.pi05.settings import resolve
from test.measure.tiny import SIZES, settings, write_tiny

HAS_LEROBOT = lerobot_version() is not None
needs_lerobot = pytest.mark.skipif(not HAS_LEROBOT, reason="LeRobot is not installed here")


def command(folder: Path, images: list[str], out: Path, *more: str, dtype: str = "float32") -> list[str]:
    names = {**SIZES, "dtype": dtype, "max_pixels": 480000}
    sizes = [part for name, value in names.items() for part in ("--set", f"{name}={value}")]
    few = ["--photographs", "6", "--steps", "1,2", "--images", *images, "--out", str(out)]
    return ["verify", "--checkpoint", str(folder), *sizes, *few, *more]


@needs_lerobot
def test_float32_is_the_official_model(folder: Path, images: list[str], tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    assert main(command(folder, images, out)) == 0
    report = json.loads(out.read_text())
    assert report["failures"] == []
    assert report["observations"] == {"1 views": 2, "2 views": 2, "3 views": 2}
    for steps in ("1", "2"):
        assert report["steps"][steps]["ours"]["relative_error"] < 1e-5
        assert report["steps"][steps]["official bfloat16"]["relative_error"] > 1e-4
    assert len(report["key_value"]["ours"]) == SIZES["layers"]
    assert max(max(errors.values()) for errors in report["key_value"]["ours"]) < 1e-5


@needs_lerobot
def test_bfloat16_is_measured_against_both(folder: Path, images: list[str], tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    main(command(folder, images, out, dtype="bfloat16"))
    report = json.loads(out.read_text())
    assert 1e-4 < report["steps"]["2"]["ours"]["relative_error"] < 2e-2
    assert report["steps"]["2"]["ours"]["cosine_global"] > 0.999


@needs_lerobot
def test_other_weights_are_below_the_bar(
    folder: Path, images: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ours reads another file than LeRobot does: the worst mistake there is must not pass."""
    other = write_tiny(tmp_path / "other", seed=9)
    real = Official.__init__

    def elsewhere(self: Official, source: Path, *arguments: object) -> None:
        del source
        real(self, other, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Official, "__init__", elsewhere)
    assert main(command(folder, images, tmp_path / "report.json")) == 1
    assert "BELOW THE BAR" in capsys.readouterr().out


@needs_lerobot
def test_lerobot_returning_random_weights_is_noticed(folder: Path, tmp_path: Path) -> None:
    """It prints a warning and goes on when a tensor is missing."""
    broken = write_tiny(tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    del weights["model.time_mlp_in.bias"]
    save_file(weights, broken / "model.safetensors")
    config = resolve(settings(folder)).config
    with pytest.raises(MeasureError, match="LeRobot did not load"):
        Official(broken, config, "float32", torch.device("cpu"))


@pytest.mark.skipif(HAS_LEROBOT, reason="LeRobot is installed here")
def test_without_lerobot_the_command_says_what_to_install(
    folder: Path, images: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(folder, images, tmp_path / "report.json")) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "LeRobot cannot be imported here" in error
    assert "lerobot[pi]==0.6.1" in error


def test_looking_for_lerobot_imports_nothing_else() -> None:
    assert ("lerobot" in sys.modules) == HAS_LEROBOT
