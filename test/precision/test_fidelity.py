"""The gate's record: what passes, what fails, and that everything in between fails too."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from flashrt_ros.precision.errors import FidelityError
from flashrt_ros.precision.fidelity import (
    Result,
    failures,
    fidelity_file,
    record,
    recorded,
    recorded_report,
    require,
)
from flashrt_ros.precision.tier import Fidelity

BAR = Fidelity(0.9995, 0.999)
GOOD = Result(0.9999, 0.9995, "float32", 12, BAR, ())


@pytest.fixture
def calibration(tmp_path: Path) -> Path:
    return tmp_path / "c.safetensors"


def test_a_result_is_found_by_its_fingerprint(calibration: Path) -> None:
    path = record(calibration, "aa", GOOD, {"date": "today"})
    assert path == fidelity_file(calibration)
    assert path.name == "c.safetensors.fidelity.json"
    other = dataclasses.replace(GOOD, observations=3)
    record(calibration, "bb", other, {})
    assert recorded(calibration, "aa") == GOOD
    assert recorded(calibration, "bb") == other
    assert recorded(calibration, "cc") is None
    assert json.loads(path.read_text())["aa"]["report"] == {"date": "today"}


def test_the_whole_report_is_found_too(calibration: Path) -> None:
    path = record(calibration, "aa", GOOD, {"relative_error": 0.01})
    assert recorded_report(calibration, "aa") == {"relative_error": 0.01}
    with pytest.raises(FidelityError, match="has no report of bb"):
        recorded_report(calibration, "bb")
    path.write_text('{"aa": {"report": 7}}')
    with pytest.raises(FidelityError, match=r"has no report of aa; remove it and run `flashrt verify --tier`"):
        recorded_report(calibration, "aa")


def test_a_tier_that_passed_may_start(calibration: Path) -> None:
    record(calibration, "aa", GOOD, {})
    assert require(calibration, "aa", "8-bit", BAR) == GOOD
    assert str(GOOD).startswith("passed: cosine 0.999900, worst 0.999500 of 12 observations against float32")


def test_a_tier_that_was_never_measured_may_not(calibration: Path) -> None:
    with pytest.raises(FidelityError, match="has not passed its fidelity gate for contract aa.*flashrt verify --tier"):
        require(calibration, "aa", "8-bit", BAR)


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (dataclasses.replace(GOOD, cosine_global=0.9994), "global cosine 0.999400 is below 0.9995"),
        (dataclasses.replace(GOOD, cosine_worst=0.99), "worst cosine 0.990000 is below 0.999"),
        (dataclasses.replace(GOOD, failures=("action 'gripper': cosine 0.5",)), "action 'gripper'"),
        (dataclasses.replace(GOOD, cosine_global=math.nan), "holds a cosine that is no number"),
    ],
)
def test_a_tier_that_failed_may_not(calibration: Path, result: Result, said: str) -> None:
    record(calibration, "aa", result, {})
    with pytest.raises(FidelityError, match=said):
        require(calibration, "aa", "8-bit", BAR)
    assert not result.passed
    assert str(result).startswith("FAILED")


def test_a_bar_that_was_raised_since_counts(calibration: Path) -> None:
    record(calibration, "aa", GOOD, {})
    with pytest.raises(FidelityError, match="global cosine 0.999900 is below 0.99999"):
        require(calibration, "aa", "8-bit", Fidelity(0.99999, 0.999))


@pytest.mark.parametrize("text", ["{", "[]", '{"aa": 3}', '{"aa": {"result": {"cosine_global": 1}}}', "\xff"])
def test_a_damaged_record_may_not(calibration: Path, text: str) -> None:
    fidelity_file(calibration).write_text(text, encoding="latin-1")
    with pytest.raises(FidelityError, match="remove it and run `flashrt verify --tier` again"):
        require(calibration, "aa", "8-bit", BAR)


def test_a_figure_that_is_no_number_is_below_every_bar() -> None:
    assert len(failures(math.nan, math.nan, BAR)) == 2
    assert failures(1.0, 1.0, Fidelity(1.0, 1.0)) == []


def test_a_record_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FidelityError, match="cannot write"):
        record(tmp_path / "missing" / "c.safetensors", "aa", GOOD, {})
