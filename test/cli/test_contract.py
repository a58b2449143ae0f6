"""`flashrt contract` on exported files."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashrt_ros.cli import main
from flashrt_ros.contract import Contract

from ..contract.builders import IDENTITY, make_contract


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    path = tmp_path / "toy.json"
    path.write_text(make_contract().to_json())
    return path


def test_show_prints_stages_and_fingerprint(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["contract", "show", str(exported)]) == 0
    text = capsys.readouterr().out
    assert make_contract().fingerprint in text
    assert "context   observation" in text


def test_export_prints_what_from_json_reads(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["contract", "export", str(exported)]) == 0
    assert Contract.from_json(capsys.readouterr().out) == make_contract()


def test_diff_names_fields_and_exits_with_one(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.json"
    other.write_text(make_contract(identity=type(IDENTITY)(policy="toy", weights="cd")).to_json())
    assert main(["contract", "diff", str(exported), str(other)]) == 1
    assert capsys.readouterr().out.split() == ["weights", "views", "chunk", "horizon"]
    assert main(["contract", "diff", str(exported), str(exported)]) == 0
    assert capsys.readouterr().out.startswith("equal: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "missing.json"], "cannot read missing.json: No such file"),
        (["diff"], "needs two exported files"),
        (["show", "--policy", "pi06"], "unknown policy 'pi06'"),
        (["show", "--set", "preset"], "expected KEY=VALUE"),
        (["show", "--set", "preset=[1"], "not valid YAML"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["contract", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_file_that_is_no_contract(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.json"
    bad.write_bytes(b"\xff\xfe")
    assert main(["contract", "show", str(bad)]) == 2
    assert str(bad) in capsys.readouterr().err


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    assert "contract" in capsys.readouterr().out
