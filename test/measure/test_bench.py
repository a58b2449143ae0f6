"""`bench` on a CPU, whole: every field of the result file is there, and what would make it meaningless is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashrt_ros.cli import main
from flashrt_ros.measure.errors import MeasureError
from flashrt_ros.measure.pi05 import bench as bench_module
from flashrt_ros.measure.pi05.baselines import PLAIN_GRAPH, Baseline
from flashrt_ros.measure.pi05.bench import Options, bench
from flashrt_ros.measure.pi05.result import merged, parity_summary
from flashrt_ros.measure.pi05.starts import starts
from flashrt_ros.measure.pi05.subject import CALL_PARTS, STARTS, Case, Subject
from flashrt_ros.measure.rounds import Pace, Schedule
from test.measure.tiny import SIZES, pictures, settings

SCHEDULE = Schedule(rounds=2, calls=2, turn_s=0.1, fewest=2, warm_up_s=0.0, warm_up_calls=1, discarded=1)


def quiet(text: str) -> None:
    del text


@pytest.fixture(scope="module")
def result(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    case = Case(views=2, chunk=4, tokens=111).settings(settings(folder), tmp_path_factory.mktemp("cut") / "c")
    pace = Pace(hz=100, calls=3, discarded=1)
    options = Options("cpu", SCHEDULE, (PLAIN_GRAPH,), mechanisms=True, load=True, pace=pace)
    return bench(case, options, pictures(), quiet)


def test_the_configuration_is_the_one_asked_for(result: dict[str, Any]) -> None:
    assert (result["views"], result["chunk"], result["tokens"], result["tier"]) == (2, 4, 111, "32-bit")
    assert result["device"] == "cpu"


def test_every_field_of_the_result_file_is_there(result: dict[str, Any]) -> None:
    for name in ("replay_ms", "call_ms"):
        assert list(result[name]) == ["p50", "p95", "p99"]
        assert 0 < result[name]["p50"] <= result[name]["p99"]
    assert list(result["stage_ms"]) == ["vision", "prefix", "expert"]
    assert min(result["stage_ms"].values()) > 0
    assert result["first_action_s"] * 1e3 > result["call_ms"]["p50"]
    fields = {"kernels", "baselines", "pairs", "parity", "roofline", "machine", "versions", "protocol"}
    assert fields <= set(result)
    assert json.loads(json.dumps(result)) == result


def test_calls_at_a_fixed_rate_have_figures_of_their_own(result: dict[str, Any]) -> None:
    paced = result["at_rate"]
    assert (paced["hz"], paced["calls_timed"]) == (100, 3)
    for name in ("replay", "call"):
        assert paced["p99_over_p50"][name] == pytest.approx(
            paced[f"{name}_ms"]["p99"] / paced[f"{name}_ms"]["p50"], rel=0.01
        )
    assert "100 calls a second" in paced["protocol"]


def test_the_parts_of_a_call_add_up_to_a_call(result: dict[str, Any]) -> None:
    parts = result["call_parts_us"]
    assert list(parts) == list(CALL_PARTS)
    assert min(parts.values()) > 0
    # Other calls, perhaps beside something else that runs: within an order of magnitude, so that no unit is mistaken.
    assert 0.1 < sum(parts.values()) / 1e3 / result["call_ms"]["p50"] < 10
    assert result["windows"] == "host"


def test_starts_are_timed_in_processes_of_their_own(result: dict[str, Any]) -> None:
    load = result["load_s"]
    assert load["second_start_with_imports"] > load["second_start"] > 0
    for name, parts in (("first_action", "first_parts"), ("second_start", "second_parts")):
        assert tuple(load[parts]) == STARTS
        assert sum(load[parts].values()) == pytest.approx(load[name], rel=0.05)


def test_a_start_that_fails_is_told_with_its_last_line() -> None:
    with pytest.raises(MeasureError, match="ended with code 1: .*unknown setting 'nonsense'"):
        starts({"preset": "pi05_tiny", "nonsense": 1}, "cpu")


def test_what_a_cpu_cannot_tell_is_null_and_not_zero(result: dict[str, Any]) -> None:
    assert result["kernels"] is None
    assert result["baseline_kernels"] == {PLAIN_GRAPH: None}
    assert result["roofline"] is None
    assert result["gpu"] is None


def test_the_baseline_computed_the_same(result: dict[str, Any]) -> None:
    assert result["baseline_cosine"][PLAIN_GRAPH] == pytest.approx(1, abs=1e-4)
    assert result["speedup"][PLAIN_GRAPH] == pytest.approx(
        result["baselines"][PLAIN_GRAPH] / result["replay_ms"]["p50"], rel=1e-2
    )


def test_pairs_are_timed_or_their_absence_is_explained(result: dict[str, Any]) -> None:
    off, on = result["pairs"]["reuse"]
    assert off > 0
    assert on == result["replay_ms"]["p50"]
    assert set(result["pairs"]) | set(result["pairs_missing"]) == {"reuse", "overlap", "mapped_windows"}
    assert result["pairs_missing"]["mapped_windows"] == "windows are host memory on 'cpu'"


def test_a_baseline_that_computes_something_else_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[..., list[Baseline]] = bench_module._rivals

    def wrong(*arguments: Any) -> list[Baseline]:
        return [Baseline(b.name, b.run, lambda b=b: np.flip(b.actions(), 0)) for b in real(*arguments)]  # type: ignore[misc]

    monkeypatch.setattr(bench_module, "_rivals", wrong)
    case = Case(1, 4, 111).settings(settings(folder), tmp_path / "c")
    with pytest.raises(MeasureError, match="'plain_graph' computes something else"):
        bench(case, Options("cpu", SCHEDULE, (PLAIN_GRAPH,)), pictures(), quiet)


def test_a_mechanism_that_changes_a_bit_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rebuild(subject: Subject) -> None:
        subject.replay()
        subject.runner.session.arena["actions"][0, 0] += 1e-6

    monkeypatch.setattr(Subject, "rebuild", rebuild)
    case = Case(1, 4, 111).settings(settings(folder), tmp_path / "c")
    with pytest.raises(MeasureError, match="'reuse' off and on differ"):
        bench(case, Options("cpu", SCHEDULE, (), mechanisms=True), pictures(), quiet)


def test_both_plans_are_measured_alike(folder: Path, tmp_path: Path) -> None:
    case = Case(1, 4, 111).settings(settings(folder, plan="full"), tmp_path / "c")
    found = bench(case, Options("cpu", SCHEDULE), pictures(), quiet)
    assert found["plan"] == "full"
    assert found["stage_ms"]["expert"] > 0


def test_a_newer_result_takes_the_place_of_the_older_one(result: dict[str, Any]) -> None:
    older, another = {**result, "kernels": 1}, {**result, "views": 3}
    assert merged([older, another], [result]) == [result, another]
    assert merged([another], [result]) == [another, result]


def test_a_result_without_starts_keeps_those_of_the_older_one(result: dict[str, Any]) -> None:
    assert merged([result], [{**result, "load_s": None}]) == [result]
    assert merged([{**result, "load_s": {"date": "earlier"}}], [result]) == [result]


def test_the_parity_report_is_summed_up_by_its_largest_number_of_steps() -> None:
    def distances(cosine: float) -> dict[str, Any]:
        return {"cosine_global": cosine, "cosine_worst": cosine, "max_abs_per_dim": [0.1], "relative_error": 0.2}

    models = {"ours": distances(0.99995), "official bfloat16": distances(0.9999)}
    early = {name: distances(0.5) for name in models}
    summed = parity_summary({"steps": {"2": early, "10": models}, "observations": {}, "failures": []})
    assert summed is not None
    assert summed["cosine_global"] == 0.99995
    assert summed["official_bf16_cosine_global"] == 0.9999


# The commands, on the same checkpoint.


def sizes() -> list[str]:
    names = {**SIZES, "dtype": "float32", "max_pixels": 480000}
    return [part for name, value in names.items() for part in ("--set", f"{name}={value}")]


def test_the_command_writes_one_object_a_configuration(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("skimage")
    out = tmp_path / "results" / "cpu.json"
    quick = ["--rounds", "1", "--calls", "1", "--turn-seconds", "0.01", "--tokens", "111"]
    command = ["bench", "pi05", "--checkpoint", str(folder), *sizes(), *quick, "--out", str(out)]
    assert main([*command, "--cases", "1x4,2x4"]) == 0
    assert main([*command, "--cases", "2x4"]) == 0
    found = json.loads(out.read_text())
    assert [(r["views"], r["chunk"]) for r in found] == [(1, 4), (2, 4)]
    assert "2 views, 111 tokens, chunk 4" in capsys.readouterr().out


def test_what_was_timed_is_kept_when_the_process_is_ended_behind_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("skimage")

    def ended(timed: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_module, "_kernels", ended)
    out = tmp_path / "cpu.json"
    quick = ["--rounds", "1", "--calls", "1", "--turn-seconds", "0.01", "--tokens", "111", "--cases", "2x4"]
    assert main(["bench", "pi05", "--checkpoint", str(folder), *sizes(), *quick, "--out", str(out)]) == 130
    (found,) = json.loads(out.read_text())
    assert found["replay_ms"]["p50"] > 0
    assert found["kernels"] is None


def test_the_profile_command_tells_kernels_and_draws(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("skimage")
    png, out = tmp_path / "layer.png", tmp_path / "profile.json"
    command = ["profile", "pi05", "--checkpoint", str(folder), *sizes(), "--tokens", "111", "--case", "1x4"]
    assert main([*command, "--png", str(png), "--out", str(out), "--baselines", PLAIN_GRAPH]) == 0
    found = json.loads(out.read_text())["figures"]
    assert set(found) == {"decision", "context", "action", PLAIN_GRAPH}
    assert found["decision"]["gemms"] == found["context"]["gemms"] + found["action"]["gemms"]
    assert found[PLAIN_GRAPH]["gemms"] == found["decision"]["gemms"]
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "gaps ms" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--baselines", "tensorrt"], "unknown baseline 'tensorrt'"),
        (["--cases", "9x4"], "9 views were asked for"),
        (["--tokens", "2"], "exactly 2 tokens"),
        (["--device", "cuda:9"], "cuda:9"),
        (["--set", "plan=3"], "setting 'plan'"),
        (["--parity", "/nowhere.json"], "cannot read /nowhere.json"),
    ],
)
def test_mistakes_are_told_in_one_line(
    folder: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("skimage")
    assert main(["bench", "pi05", "--checkpoint", str(folder), *sizes(), *arguments]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("flashrt: ")
    assert message in error


@pytest.mark.parametrize("rate", ["0", "-5", "1001", "nan", "often"])
def test_a_rate_that_is_none_is_refused(rate: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "pi05", f"--rate={rate}"])
    assert f"'{rate}' is no rate" in capsys.readouterr().err


def test_lerobot_as_a_baseline_needs_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("skimage")
    assert main(["bench", "pi05", "--set", "preset=pi05_tiny", "--baselines", "lerobot_eager"]) == 2
    assert "needs a checkpoint that LeRobot can load" in capsys.readouterr().err
