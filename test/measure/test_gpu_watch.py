"""What nvidia-smi prints, summed up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flashrt_ros.measure.gpu import GpuWatch, summed_up

OUTPUT = """120.50, 345, 3201, 30, 0
700.25, 1980, 3201, 61, 100
650.00, 1965, 3201, 60, [N/A]
70"""


def test_each_column_is_summed_up() -> None:
    seen = summed_up(OUTPUT)
    assert seen is not None
    assert seen["power_w"] == {"min": 120.5, "median": 650.0, "max": 700.25}
    assert seen["sm_mhz"]["max"] == 1980
    assert seen["utilisation_percent"] == {"min": 0, "median": 100, "max": 100}
    assert seen["samples"] == 3


def test_nothing_seen_is_none() -> None:
    assert summed_up("") is None


def test_without_the_program_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with GpuWatch() as watch:
        pass
    assert watch.seen() is None


def test_the_program_is_asked_for_the_columns_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    started = tmp_path / "started"
    os.mkfifo(started)
    columns = "power.draw,clocks.sm,clocks.mem,temperature.gpu,utilization.gpu"
    program.write_text(
        f'#!/bin/sh\ncase "$1" in *{columns}) ;; *) exit 1 ;; esac\n'
        f'echo "1.5, 2, 3, 4, 5"\necho > {started}\nexec sleep 60\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with GpuWatch() as watch:
        started.read_text()  # waits until the line is out
    seen = watch.seen()
    assert seen is not None
    assert seen["power_w"]["max"] == 1.5
