"""What the README says about parameters, topics, services and figures is what the code and the results say."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from flashrt_ros.node.parameters import FAMILIES, PARAMETERS, Parameter
from scripts.readme_figures import refreshed

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def shown_default(parameter: Parameter) -> str:
    value = parameter.default
    if isinstance(value, bool):
        return "`true`" if value else "`false`"
    if isinstance(value, str):
        return f"`{value}`" if value else "empty"
    if isinstance(value, list):
        return ", ".join(f"`{item}`" for item in value) or "empty"
    return ("∞" if value > 0 else "−∞") if math.isinf(value) else f"`{value}`"


def row(parameter: Parameter) -> str:
    """The line of the README's table for `parameter`."""
    name = parameter.name.replace("*", "<name>")
    description = parameter.description.replace("<", r"\<")
    return f"| `{name}` | {parameter.kind} | {shown_default(parameter)} | {description} |"


@pytest.mark.parametrize("parameter", [*PARAMETERS, *FAMILIES], ids=lambda parameter: parameter.name)
def test_every_parameter_has_its_line(parameter: Parameter) -> None:
    assert row(parameter) in README.splitlines()


def test_the_table_has_no_parameter_that_does_not_exist() -> None:
    table = README.partition("### Parameters")[2].partition("\n## ")[0]
    named = set(re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE))
    declared = {parameter.name.replace("*", "<name>") for parameter in (*PARAMETERS, *FAMILIES)}
    assert named == declared | {"policy.<setting>"}


def test_every_interface_is_named() -> None:
    for path in (ROOT / "srv").glob("*.srv"):
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", path.stem).lower()
        assert re.search(rf"`(~/)?{name}`", README), f"the README does not name the service {name}"


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\((?!https?:)([^)#]+)\)", README))))
def test_links_lead_somewhere(link: str) -> None:
    assert (ROOT / link).exists()


def benchmark_figures() -> list[tuple[str, str, str]]:
    """(file, dotted key, text) of every figure that the README takes from a result, marked in an HTML comment."""
    return re.findall(r"<!-- (\w+)\.json ([\w.]+) -->([^\s|]+)", README)


def test_figures_are_those_of_the_committed_results() -> None:
    figures = benchmark_figures()
    assert figures
    for file, key, text in figures:
        value = json.loads((ROOT / "benchmarks" / "results" / f"{file}.json").read_text())
        for part in key.split("."):
            value = value[int(part)] if isinstance(value, list) else value[part]
        assert float(text) == pytest.approx(value, rel=0.005), f"{file}.json {key} is {value}, the README says {text}"


def test_a_figure_is_written_anew_only_if_it_changed(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps([{"ms": 9.043, "calls": 1000.0, "us": 2.5}]))
    text = "<!-- run.json 0.ms -->9.04 ms, <!-- run.json 0.calls -->- calls, <!-- run.json 0.us -->2.51 µs"
    fresh = "<!-- run.json 0.ms -->9.04 ms, <!-- run.json 0.calls -->1000 calls, <!-- run.json 0.us -->2.5 µs"
    assert refreshed(text, tmp_path) == fresh


def test_a_figure_that_no_result_has_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps([{"ms": 9.0}]))
    for key in ("0.us", "1.ms", "0.ms.p50", "0"):
        with pytest.raises(KeyError, match=f"run.json has no number at {key}"):
            refreshed(f"<!-- run.json {key} -->1", tmp_path)


def test_a_figure_with_too_few_places_is_written_anew(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps([{"ms": 7.4}]))
    assert refreshed("<!-- run.json 0.ms -->7 ms", tmp_path) == "<!-- run.json 0.ms -->7.4 ms"
