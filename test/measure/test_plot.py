"""`flashrt plot`: which results become points, and a picture that says what they are."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from flashrt_ros.cli import main
from flashrt_ros.measure.agreement import COSINE, ERROR, Panel, panels
from flashrt_ros.measure.errors import MeasureError
from test.sources import ROOT

TIERS = ["16-bit", "8-bit", "4-bit"]


def result(tier: str = "16-bit", ms: float = 10.0, cosine: float | None = 0.9999, **changes: Any) -> dict[str, Any]:
    """What `flashrt bench` keeps of one policy, as far as a picture needs it."""
    found = {"cosine_global": cosine, "cosine_worst": 0.999, "relative_error": 0.01, "passed": True}
    return {
        "preset": "pi05", "views": 2, "tokens": 200, "chunk": 10, "plan": "split", "device": "cuda", "tier": tier,
        "machine": {"cpu": "a processor", "gpu": "NVIDIA H200"}, "replay_ms": {"p50": ms}, "baselines": {},
        "agreement": None if cosine is None else found, "parity": None, "date": "today", "interleaved": TIERS,
        **changes,
    }  # fmt: skip


def parity(**changes: Any) -> dict[str, Any]:
    found = {"cosine_global": 0.9999993, "cosine_worst": 0.9999991, "relative_error": 0.0012, "failures": []}
    return found | {"official_bf16_cosine_global": 0.99998, "official_bf16_relative_error": 0.006} | changes


def found(results: list[dict[str, Any]], metric: str = COSINE) -> tuple[list[Panel], list[str]]:
    said: list[str] = []
    return panels(results, metric, said.append), said


# -- points ------------------------------------------------------------------------------------------------------------


def test_a_point_is_the_distance_from_float32() -> None:
    ((panel,), said) = found([result("8-bit", 6.0)])
    (point,) = panel.points
    assert (point.label, point.ms, point.passed) == ("8-bit", 6.0, True)
    assert point.distance == pytest.approx(1e-4)
    assert point.worst == pytest.approx(1e-3)
    assert panel.title == "pi05 on NVIDIA H200: 2 views, 200 tokens, chunk 10"
    assert said == []


def test_the_relative_error_has_no_worst_observation() -> None:
    ((panel,), _) = found([result()], ERROR)
    assert [(point.distance, point.worst) for point in panel.points] == [(0.01, None)]


def test_parity_is_the_agreement_of_16_bit_and_brings_the_official_model() -> None:
    wide = result(cosine=None, parity=parity(), baselines={"plain_graph": 25.8})
    ((panel,), _) = found([wide, result("8-bit", 6.0)])
    assert panel.points[0].distance == pytest.approx(7e-7)
    assert panel.official == pytest.approx(2e-5)
    assert panel.baselines == {"plain_graph": 25.8}


def test_what_failed_its_gate_says_so() -> None:
    failed = result("4-bit", agreement={**result()["agreement"], "passed": False})
    ((panel,), _) = found([failed, result(cosine=None, parity=parity(failures=["too far"]))])
    assert [point.passed for point in panel.points] == [False, False]


def test_a_result_without_agreement_is_told_and_left_out() -> None:
    infinite = result("4-bit", agreement={**result()["agreement"], "relative_error": float("inf")})
    ((panel,), said) = found([result(cosine=None), result("8-bit"), infinite], ERROR)
    assert [point.tier for point in panel.points] == ["8-bit"]
    assert [text.split(", pi05")[0] for text in said] == ["left out: 16-bit", "left out: 4-bit"]


def test_each_configuration_has_its_panel_and_devices_are_not_mixed() -> None:
    both, _ = found([result(), result(views=3), result(device="cpu")])
    assert [len(panel.points) for panel in both] == [1, 1, 1]
    assert both[2].title.startswith("pi05 on a processor")


def test_two_plans_of_one_configuration_are_told_apart() -> None:
    ((panel,), _) = found([result(), result(plan="full")])
    assert [point.label for point in panel.points] == ["16-bit (split)", "16-bit (full)"]


@pytest.mark.parametrize(
    ("changes", "together"),
    [({}, True), ({"date": "yesterday"}, False), ({"interleaved": ["8-bit"]}, False)],
)
def test_only_one_interleaved_run_is_called_so(changes: dict[str, Any], together: bool) -> None:
    ((panel,), _) = found([result(), result("8-bit", **changes)])
    assert panel.together is together


def test_results_that_never_heard_of_tiers_are_drawn_too() -> None:
    old = {k: v for k, v in result(parity=parity()).items() if k not in ("agreement", "interleaved")}
    ((panel,), _) = found([old])
    assert not panel.together


def test_the_committed_results_of_the_h200_can_be_drawn() -> None:
    committed = json.loads((ROOT / "benchmarks" / "results" / "h200_pi05.json").read_text())
    drawn, _ = found(committed)
    assert all("H200" in panel.title for panel in drawn)


@pytest.mark.parametrize("results", [[], [result(cosine=None)]], ids=["nothing", "no agreement"])
def test_nothing_to_draw_is_refused_with_what_to_do(results: list[dict[str, Any]]) -> None:
    with pytest.raises(MeasureError, match="no result here has an agreement: give `flashrt bench`"):
        found(results)


@pytest.mark.parametrize("wrong", [{}, {**result(), "machine": None}, 7])
def test_something_else_than_results_is_refused(wrong: Any) -> None:
    with pytest.raises(MeasureError, match="no result of `flashrt bench`"):
        found([wrong])


# -- the command -------------------------------------------------------------------------------------------------------


def written(folder: Path, results: Any) -> Path:
    path = folder / "results.json"
    path.write_text(json.dumps(results))
    return path


def several() -> list[dict[str, Any]]:
    """Every kind of mark: failed, exact, of a user's own tier; baselines that are the official model or not."""
    times = {"plain_graph": 25.8, "lerobot_eager": 88.0}
    failed = {**result()["agreement"], "passed": False}
    return [
        result(cosine=None, parity=parity(), baselines=times),
        result("8-bit", 6.0),
        result("4-bit", 5.9, agreement=failed),
        result("mine", 7.0, cosine=1.0),
    ]


@pytest.mark.parametrize("more", [[], ["--linear"], ["--agreement", "error"]])
def test_the_picture_names_every_mark(tmp_path: Path, more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "new" / "picture.svg"
    assert main(["plot", str(written(tmp_path, several())), "--out", str(out), *more]) == 0
    drawn = out.read_text()  # every text stands in front of its outlines, as a comment
    for text in ("16-bit", "8-bit", "4-bit", "mine", "6 ms", "below its bar", "LeRobot&#39;s own bfloat16"):
        assert f"<!-- {text} -->" in drawn or f"<!-- {text.replace('&#39;', chr(39))} -->" in drawn, text
    assert "plain graph, 25.8 ms" in drawn
    assert "pi05 on NVIDIA H200: 2 views, 200 tokens, chunk 10" in drawn
    assert ("logarithmic" in drawn) == ("--linear" not in more)
    assert ("relative error" in drawn) == ("error" in more)
    assert "4 of 4 results" in capsys.readouterr().out


@pytest.mark.parametrize("count", [1, 2, 4])
def test_pictures_of_one_and_of_several_results(tmp_path: Path, count: int) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "picture.png"
    assert main(["plot", str(written(tmp_path, several()[:count])), "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")


def test_labels_of_close_marks_stand_on_either_side() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    from flashrt_ros.measure import agreement

    ((panel,), _) = found([result("8-bit", 6.0), result("4-bit", 6.05), result(ms=10.0)])
    axes = figure.subplots()
    agreement._draw(axes, panel, COSINE, dict.fromkeys(("8-bit", "4-bit", "16-bit"), "black"), linear=True)
    sides = {text.get_text().split("\n")[0]: text.get_ha() for text in axes.texts if "ms" in text.get_text()}
    assert sides == {"8-bit": "right", "4-bit": "left", "16-bit": "left"}


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plot", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_picture_without_matplotlib_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    out = tmp_path / "picture.png"
    assert "needs matplotlib; it comes with" in refused(capsys, str(written(tmp_path, several())), "--out", str(out))
    assert not out.exists()


def test_a_picture_of_an_unknown_kind_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    line = refused(capsys, str(written(tmp_path, several())), "--out", str(tmp_path / "picture.xyz"))
    assert "cannot write the picture" in line
    assert "xyz" in line


@pytest.mark.parametrize(
    ("content", "said"),
    [("{}", "is no list of results"), ("[", "is not valid JSON"), ("[]", "no result here has an agreement")],
)
def test_files_that_hold_no_results_are_refused(
    tmp_path: Path, content: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.json"
    path.write_text(content)
    assert said in refused(capsys, str(path), "--out", str(tmp_path / "picture.png"))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot read /nowhere.json" in refused(capsys, "/nowhere.json", "--out", str(tmp_path / "picture.png"))
