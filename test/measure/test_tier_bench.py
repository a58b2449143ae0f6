"""Tiers timed beside 16-bit in one run, and what is refused before anything is loaded."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from flashrt_ros.cli import main
from flashrt_ros.measure.errors import MeasureError
from flashrt_ros.measure.pi05.asked_tiers import AskedTier, require_room, tier_settings
from flashrt_ros.measure.pi05.bench import Options, bench_together
from flashrt_ros.measure.pi05.subject import Case
from flashrt_ros.measure.rounds import Pace, Schedule
from flashrt_ros.policies.pi05 import build, identify
from flashrt_ros.policies.pi05.memory import needed_bytes
from test.measure.tiny import SIZES, pictures, settings, tiny_config, write_tiny

CASE = ["--tokens", "100"]
FEW = ["--rounds", "2", "--calls", "1", "--turn-seconds", "0.01"]


def command(name: str, folder: Path, images: list[str], *more: str) -> list[str]:
    sizes = {**SIZES, "dtype": "float32", "max_pixels": 480000}
    parts = [part for key, value in sizes.items() for part in ("--set", f"{key}={value}")]
    start = [name, "pi05"] if name == "bench" else [name]
    return [*start, "--checkpoint", str(folder), *parts, "--images", *images, *CASE, *more]


def calibrated(tier: str, folder: Path, images: list[str], out: Path) -> Path:
    made = ["--tier", tier, "--case", "2x4", "--photographs", "2", "--out", str(out)]
    assert main(command("calibrate", folder, images, *made)) == 0
    return out


@pytest.fixture(scope="module")
def files(folder: Path, images: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Calibrations of two tiers, of which one has passed its gate."""
    target = tmp_path_factory.mktemp("tiers")
    made = {tier: calibrated(tier, folder, images, target / f"{tier}.safetensors") for tier in ("8-bit", "4-bit")}
    gate = [
        "--tier",
        "8-bit",
        "--calibration",
        str(made["8-bit"]),
        "--case",
        "2x4",
        "--photographs",
        "2",
        "--seed",
        "1",
    ]
    assert main(command("verify", folder, images, *gate, "--out", str(target / "gate.json"))) == 0
    return {**made, "gate": target / "gate.json"}


def asked(files: dict[str, Path], *tiers: str) -> str:
    return ",".join(f"{tier}={files[tier]}" for tier in tiers)


# -- good --------------------------------------------------------------------------------------------------------------


def test_tiers_are_timed_beside_16_bit_in_one_run(
    folder: Path, images: list[str], files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bench.json"
    more = ["--cases", "2x4", "--tiers", asked(files, "8-bit", "4-bit"), "--mechanisms", "--baselines", "plain_graph"]
    assert main(command("bench", folder, images, *more, *FEW, "--out", str(out))) == 0
    wide, eight, four = results = json.loads(out.read_text())
    assert [r["tier"] for r in results] == ["32-bit", "8-bit", "4-bit"]
    assert all(r["interleaved"] == ["32-bit", "8-bit", "4-bit"] and r["date"] == wide["date"] for r in results)
    assert len({r["fingerprint"] for r in results}) == 3
    for r in results:
        assert min(r["replay_ms"]["p50"], r["call_ms"]["p50"], *r["stage_ms"].values()) > 0
        assert set(r["pairs"]) == {"reuse", "overlap"}
        assert r["pairs"]["reuse"][1] == r["replay_ms"]["p50"]
        assert r["calls_timed"]["replay"] == 2 * 3  # rounds, and the fewest calls of a turn
        assert r["kernel_reports"] == ["all: reference"]
        assert r["held_bytes"] is None
    assert list(wide["baselines"]) == ["plain_graph"]
    assert eight["baselines"] == four["baselines"] == wide["speedup_over"] == {}
    gain = eight["speedup_over"]["32-bit"]
    assert list(gain) == ["replay", "call", "vision", "prefix", "expert"]
    assert gain["replay"] == pytest.approx(wide["replay_ms"]["p50"] / eight["replay_ms"]["p50"], rel=0.01)
    assert wide["weight_bytes"]["ratio"] == 2  # float32
    assert four["weight_bytes"]["ratio"] < eight["weight_bytes"]["ratio"] < 1
    assert "agreement not on record for 32-bit, 4-bit" in capsys.readouterr().out
    gate = json.loads(files["gate"].read_text())
    assert eight["fingerprint"] == gate["fingerprint"]
    assert eight["weight_bytes"] == gate["weight_bytes"]
    for name in ("cosine_global", "cosine_worst", "relative_error", "reference", "observations", "bar", "weights"):
        assert eight["agreement"][name] == gate[name], name
    assert eight["agreement"]["passed"] is True
    assert wide["agreement"] is four["agreement"] is None


def test_every_tier_is_timed_at_the_rate_too(folder: Path, files: dict[str, Path], tmp_path: Path) -> None:
    given = Case(2, 4, 100).settings(settings(folder), tmp_path / "cut")
    each = tier_settings(given, [AskedTier("8-bit", files["8-bit"])], "cpu")
    schedule = Schedule(rounds=1, calls=1, turn_s=0.01, fewest=1, warm_up_s=0.0, warm_up_calls=1, discarded=1)
    kept: list[list[dict[str, Any]]] = []
    options = Options("cpu", schedule, pace=Pace(hz=100, calls=5, discarded=1))
    results = bench_together(each, options, pictures(), lambda _: None, kept.append)
    assert [r["at_rate"]["calls_timed"] for r in results] == [5, 2]  # a quarter, and no part of a call
    for r in results:
        assert 0 < r["at_rate"]["replay_ms"]["p50"] <= r["at_rate"]["replay_ms"]["p99"]
    assert [[r["at_rate"] for r in early] for early in kept] == [[None, None]]


def test_the_identity_is_known_without_loading(folder: Path) -> None:
    config, identity = identify(settings(folder))
    built = build(settings(folder))
    assert config == built.config
    assert identity == built.contract.identity  # on a CPU kernels and architecture are those that it leaves open


def test_a_tier_of_a_user_s_own_is_named_by_its_file(folder: Path, images: list[str], tmp_path: Path) -> None:
    own = tmp_path / "mine.yaml"
    rules = '[{sites: "expert.*", weight: e4m3, activation: 16-bit, why: a test}, '
    rules += '{sites: "*", weight: 16-bit, activation: 16-bit, why: a test}]'
    own.write_text(f"tier: mine\nfidelity: {{cosine_global: 0.99, cosine_worst: 0.9}}\nrules: {rules}\n")
    calibration, out = calibrated(str(own), folder, images, tmp_path / "c.safetensors"), tmp_path / "out.json"
    more = ["--cases", "2x4", "--tiers", f"{own}={calibration}", *FEW, "--out", str(out)]
    assert main(command("bench", folder, images, *more)) == 0
    assert [r["tier"] for r in json.loads(out.read_text())] == ["32-bit", "mine"]


# -- bad: by name, in one line, and before anything is loaded ----------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert "load, capture" not in said
    line = said.splitlines()[-1]
    assert line.startswith("flashrt: ")
    return line


@pytest.mark.parametrize(
    ("tiers", "more", "said"),
    [
        ("9-bit={8-bit}", [], "tier '9-bit': unknown precision '9-bit'"),
        ("8-bit=/nowhere", [], "tier '8-bit': cannot read calibration '/nowhere'"),
        ("8-bit={gate}", [], "tier '8-bit': cannot read calibration"),
        ("8-bit={8-bit},8-bit={8-bit}", [], "tier '8-bit' is named twice"),
        ("16-bit={8-bit}", [], "tier '16-bit' is no narrow one"),
        ("8-bit={8-bit},4-bit={8-bit}", [], "tier '4-bit': calibration '"),
        ("8-bit={8-bit}", ["--cases", "3x4"], "belongs to another contract; what differs: views, "),
        ("8-bit={8-bit}", ["--cases", "2x4,2x6"], "--tiers goes with one case"),
        ("8-bit={8-bit}", ["--set", "precision=4-bit"], "setting 'precision' is for one tier"),
    ],
)
def test_a_tier_that_cannot_be_timed_is_refused_by_name(
    folder: Path, images: list[str], files: dict[str, Path], capsys: pytest.CaptureFixture[str],
    tiers: str, more: list[str], said: str,
) -> None:  # fmt: skip
    arguments = command("bench", folder, images, "--cases", "2x4", "--tiers", tiers.format(**files), *more)
    assert said in refused(capsys, arguments)


def test_a_tier_of_another_checkpoint_is_refused(
    images: list[str], files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_tiny(tmp_path / "other", seed=1)
    line = refused(capsys, command("bench", other, images, "--cases", "2x4", "--tiers", asked(files, "4-bit", "8-bit")))
    assert "tier '4-bit': calibration" in line
    assert "what differs: weights. Run `flashrt calibrate`" in line


@pytest.mark.parametrize("text", ["8-bit", "8-bit=", "=c.safetensors", "8-bit=c.safetensors,"])
def test_tiers_that_are_no_pairs_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "pi05", "--tiers", text])
    assert f"{text!r} is not a list of tiers with their calibrations" in capsys.readouterr().err


def test_settings_say_each_tier_and_leave_the_first_alone(folder: Path, files: dict[str, Path], tmp_path: Path) -> None:
    given = Case(2, 4, 100).settings(settings(folder), tmp_path / "cut")
    each = tier_settings(given, [AskedTier(tier, files[tier]) for tier in ("4-bit", "8-bit")], "cpu")
    assert each[0] == given
    assert [item["precision"] for item in each[1:]] == ["4-bit", "8-bit"]
    assert all(item["unverified"] is True and item["checkpoint"] == given["checkpoint"] for item in each[1:])


# -- room --------------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_together_is_refused_with_what_each_takes() -> None:
    wide = tiny_config()
    configs = {"16-bit": wide, "8-bit": dataclasses.replace(wide, precision="8-bit")}
    total = sum(needed_bytes(config) for config in configs.values())
    require_room(configs, total, twice=False)
    with pytest.raises(
        MeasureError, match=r"up to 2\.\d GiB \(16-bit 1\.\d GiB, 8-bit 1\.\d GiB\), .*; name fewer tiers$"
    ):
        require_room(configs, total - 1, twice=False)
    require_room(configs, 2 * total, twice=True)
    with pytest.raises(MeasureError, match="each runs twice, .* or leave --mechanisms out"):
        require_room(configs, total, twice=True)
