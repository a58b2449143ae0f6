"""The calibration file: kept whole, keyed by the contract, and refused in every other state."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from flashrt_ros.contract import SiteFormat
from flashrt_ros.precision import calibration as module
from flashrt_ros.precision.calibrating import calibrate
from flashrt_ros.precision.calibration import (
    Calibration,
    SiteReport,
    SiteScale,
    calibration_key,
    load_calibration,
    save_calibration,
)
from flashrt_ros.precision.errors import CalibrationError
from flashrt_ros.precision.observe import Histogram, Observer, Ranges
from flashrt_ros.precision.smoothing import Choice
from test.contract.builders import make_contract

FORMATS = (SiteFormat("a.qkv.0", "e4m3", "e4m3"), SiteFormat("a.down.0", "nvfp4"), SiteFormat("a.table", "e4m3"))
KEY = calibration_key(make_contract(), "mine", FORMATS)
REPORT = SiteReport(3, 1.0, 2.0, 0.0, 0.0, 0.5, 0.03)
GOOD = Calibration(
    KEY,
    {
        "a.qkv.0": SiteScale(0.1, torch.tensor([1.0, 0.5, 2.0])),
        "a.down.0": SiteScale(None),
        "a.table": SiteScale(None),
    },
    {"a.qkv.0": REPORT, "a.down.0": REPORT},
    {"observations": 3},
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_calibration(tmp_path / "folder" / "c.safetensors", GOOD)
    return tmp_path / "folder" / "c.safetensors"


def rewrite(path: Path, **changes: Any) -> None:
    """Change fields of the manifest, and make the file whole again, as somebody who means it would."""
    with safe_open(path, framework="pt") as file:
        manifest = json.loads(file.metadata()["manifest"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    tensors |= changes.pop("tensors", {})
    text = json.dumps({**manifest, **changes})
    save_file(tensors, path, {"manifest": text, "sha256": module._sha256(text, tensors)})


def test_it_comes_back_as_it_was(path: Path) -> None:
    again = load_calibration(path, KEY)
    assert again.digest == GOOD.digest
    assert again.contract == KEY
    assert again.reports == GOOD.reports
    assert again.protocol == GOOD.protocol
    multiplier = again.scales["a.qkv.0"].multiplier
    assert multiplier is not None
    assert multiplier.tolist() == [1.0, 0.5, 2.0]
    assert [file.name for file in path.parent.iterdir()] == ["c.safetensors"]
    (path.parent / "like_any").touch()
    assert path.stat().st_mode == (path.parent / "like_any").stat().st_mode  # another user may read it


def test_device_and_kernels_are_open_and_everything_else_is_not() -> None:
    contract = make_contract()
    moved = dataclasses.replace(contract.identity, architecture="sm_110", kernels="fused")
    assert (
        calibration_key(dataclasses.replace(contract, identity=moved), "mine", FORMATS).fingerprint == KEY.fingerprint
    )
    assert calibration_key(contract, "other", FORMATS).fingerprint != KEY.fingerprint
    assert calibration_key(contract, "mine", FORMATS[:2]).fingerprint != KEY.fingerprint


def test_the_digest_is_of_what_changes_an_action() -> None:
    def changed(**changes: Any) -> str:
        return dataclasses.replace(GOOD, **changes).digest

    assert changed(protocol={}, reports={}) == GOOD.digest
    assert changed(scales={**GOOD.scales, "a.qkv.0": SiteScale(0.2, GOOD.scales["a.qkv.0"].multiplier)}) != GOOD.digest
    assert changed(scales={**GOOD.scales, "a.qkv.0": SiteScale(0.1)}) != GOOD.digest


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"weights": "cd" * 32}, "weights"),
        ({"normalisation": "ef" * 32}, "normalisation"),
        ({"views": ("front", "wrist")}, "views"),
        ({"chunk": 7}, "chunk"),
    ],
)
def test_another_contract_is_refused_with_what_differs(path: Path, changes: dict[str, Any], field: str) -> None:
    contract = make_contract()
    other = dataclasses.replace(contract, identity=dataclasses.replace(contract.identity, **changes))
    with pytest.raises(
        CalibrationError, match=f"belongs to another contract; what differs: {field}.*flashrt calibrate"
    ):
        load_calibration(path, calibration_key(other, "mine", FORMATS))


def test_another_tier_is_refused(path: Path) -> None:
    formats = (*FORMATS[:1], SiteFormat("a.down.0", "e4m3", "e4m3"), FORMATS[2])
    with pytest.raises(CalibrationError, match="what differs: formats"):
        load_calibration(path, calibration_key(make_contract(), "mine", formats))


@pytest.mark.parametrize(
    ("scales", "said"),
    [
        ({"a.qkv.0": 0.1, "a.down.0": None}, "has no site 'a.table'"),
        ({"a.qkv.0": 0.1, "a.down.0": None, "a.table": None, "a.up.0": 1.0}, "has a site 'a.up.0' that the tier does"),
        ({"a.qkv.0": float("nan"), "a.down.0": None, "a.table": None}, "site 'a.qkv.0': input scale nan is not a pos"),
        ({"a.qkv.0": float("inf"), "a.down.0": None, "a.table": None}, "site 'a.qkv.0': input scale inf"),
        ({"a.qkv.0": 0.0, "a.down.0": None, "a.table": None}, "site 'a.qkv.0': input scale 0.0"),
        ({"a.qkv.0": -1.0, "a.down.0": None, "a.table": None}, "site 'a.qkv.0': input scale -1.0"),
        ({"a.qkv.0": "1", "a.down.0": None, "a.table": None}, "site 'a.qkv.0': input scale 1 is not"),
        ({"a.qkv.0": None, "a.down.0": None, "a.table": None}, "site 'a.qkv.0': input scale None, but its activations"),
        ({"a.qkv.0": 0.1, "a.down.0": 0.5, "a.table": None}, "site 'a.down.0': input scale 0.5, but its activ"),
    ],
)  # fmt: skip
def test_scales_that_no_measurement_gives_are_refused(path: Path, scales: dict[str, Any], said: str) -> None:
    rewrite(path, scales=scales)
    with pytest.raises(CalibrationError, match=f"{said}.*calibrate again"):
        load_calibration(path, KEY)


@pytest.mark.parametrize(
    ("multiplier", "said"),
    [
        (torch.tensor([1.0, float("nan")]), "multiplier holds a value that is not a positive number"),
        (torch.tensor([1.0, 0.0]), "multiplier holds a value"),
        (torch.ones(2, 2), r"multiplier is torch.float32\[2, 2\]"),
        (torch.ones(2, dtype=torch.float64), r"multiplier is torch.float64\[2\]"),
    ],
)
def test_multipliers_that_cannot_be_are_refused(path: Path, multiplier: torch.Tensor, said: str) -> None:
    rewrite(path, tensors={"a.qkv.0": multiplier})
    with pytest.raises(CalibrationError, match=f"site 'a.qkv.0': {said}"):
        load_calibration(path, KEY)


def test_a_tensor_of_no_site_is_refused(path: Path) -> None:
    rewrite(path, tensors={"a.up.9": torch.ones(2)})
    with pytest.raises(CalibrationError, match="has a site 'a.up.9' that the tier does not"):
        load_calibration(path, KEY)


def test_a_file_that_was_altered_is_refused(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # a multiplier's last byte
    path.write_bytes(data)
    with pytest.raises(CalibrationError, match="was altered: its SHA-256 does not fit"):
        load_calibration(path, KEY)


def test_a_file_that_is_no_calibration_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with pytest.raises(CalibrationError, match=r"cannot read calibration.*flashrt calibrate"):
        load_calibration(path)
    path.write_bytes(b"nothing")
    with pytest.raises(CalibrationError, match="cannot read calibration"):
        load_calibration(path)
    save_file({"a": torch.ones(1)}, path)
    with pytest.raises(CalibrationError, match="is no calibration"):
        load_calibration(path)


@pytest.mark.parametrize("changes", [{"schema": 2}, {"schema": None}])
def test_another_schema_is_refused(path: Path, changes: dict[str, Any]) -> None:
    rewrite(path, **changes)
    with pytest.raises(CalibrationError, match="this version reads 1"):
        load_calibration(path)


@pytest.mark.parametrize("changes", [{"contract": "{}"}, {"reports": {"a.qkv.0": {"rows": 1}}}, {"scales": 3}])
def test_a_malformed_manifest_is_refused(path: Path, changes: dict[str, Any]) -> None:
    rewrite(path, **changes)
    with pytest.raises(CalibrationError, match="is malformed"):
        load_calibration(path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CalibrationError, match="cannot write calibration"):
        save_calibration(tmp_path / "file" / "c.safetensors", GOOD)


# -- from statistics to scales -----------------------------------------------------------------------------------------


def seen(values: torch.Tensor) -> Observer:
    observer = Observer()
    for table in FORMATS[:2]:
        histogram = Histogram()
        histogram.add(values)
        observer.histograms[table.name] = histogram
        observer.ranges[table.name] = Ranges(values, values.double(), rows=5)
    return observer


def calibrated(**options: float) -> Calibration:
    values = torch.arange(1, 1001).float()
    choice = Choice(0.0, None, 0.03)
    return calibrate(seen(values), {"a.qkv.0": choice, "a.down.0": choice}, KEY, **options, protocol={})


def test_the_largest_value_fits_with_headroom() -> None:
    scale = calibrated(headroom=2.0).scales["a.qkv.0"].input_scale
    assert scale == pytest.approx(2000 / 448)
    assert calibrated(headroom=1.0).scales["a.qkv.0"].input_scale == pytest.approx(1000 / 448)


def test_a_percentile_clips_what_is_above_it_and_says_so() -> None:
    whole, clipped = calibrated(headroom=1.0), calibrated(headroom=1.0, percentile=90.0)
    assert whole.reports["a.qkv.0"].saturated == 0
    assert clipped.scales["a.qkv.0"].input_scale == pytest.approx(960 / 448)  # the edge of the bin that holds 900
    assert clipped.reports["a.qkv.0"].saturated == pytest.approx(0.041)


def test_sites_with_wide_inputs_and_tables_have_no_scale() -> None:
    made = calibrated()
    assert made.scales["a.down.0"] == SiteScale(None)
    assert made.scales["a.table"] == SiteScale(None)
    assert set(made.reports) == {"a.qkv.0", "a.down.0"}


def test_what_is_made_can_be_kept(tmp_path: Path) -> None:
    made = calibrated()
    save_calibration(tmp_path / "c.safetensors", made)
    assert load_calibration(tmp_path / "c.safetensors", KEY).digest == made.digest


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"percentile": 30.0}, "percentile is 30"),
        ({"percentile": 101.0}, "percentile is 101"),
        ({"headroom": 0.5}, "headroom is 0.5"),
        ({"percentile": float("nan")}, "percentile is nan"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, float], said: str) -> None:
    with pytest.raises(CalibrationError, match=said):
        calibrated(**options)
