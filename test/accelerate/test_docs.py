"""The template in docs/accelerate.md is a working structure, and the page names what there is."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashrt_ros.accelerate import ModuleStructure, available_structures
from test.accelerate.models import ROWS, WIDTH, examples
from test.sources import ROOT

PAGE = (ROOT / "docs" / "accelerate.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


class RowByRow(nn.Module):
    """Rows of length one, made one at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-12

    def forward(self, x: Tensor) -> Tensor:
        rows = [row / max(float(row.norm()), self.eps) for row in x.reshape(-1, x.shape[-1])]
        return torch.stack(rows).view(x.shape)


class Lookalike(nn.Module):
    """No parameters, a small constant, and something else."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-12

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.abs().sum(-1, keepdim=True) + self.eps)


@pytest.fixture(autouse=True, scope="module")
def operations_as_time() -> None:
    """The page's lines run as they stand, by the clock: what is a hundred times faster is so on any machine."""


@pytest.fixture
def template() -> dict[str, Any]:
    """Names that the template defines."""
    (block,) = [block for block in BLOCKS if "class UnitLength" in block]
    names: dict[str, Any] = {"__name__": "template"}
    exec(compile(block, "docs/accelerate.md", "exec", dont_inherit=True), names)
    return names


def run(template: dict[str, Any], model: nn.Module) -> Any:
    """The page's own lines that register the template and accelerate a model."""
    (block,) = [block for block in BLOCKS if "with registered(UnitLength())" in block]
    names = {**template, "model": model.eval(), "examples": examples()}
    exec(compile(block, "docs/accelerate.md", "exec", dont_inherit=True), names)
    return names["report"]


def test_the_template_finds_gates_and_speeds_up(template: dict[str, Any]) -> None:
    model, x = nn.Sequential(RowByRow()), torch.randn(1, ROWS, WIDTH)
    expected = model(x)
    report = run(template, model)
    assert report.kept == ("unit_length",)
    assert report.speedup > 3
    torch.testing.assert_close(model(x), expected)
    report.detach()


def test_the_template_does_not_take_what_only_looks_like_it(template: dict[str, Any]) -> None:
    report = run(template, nn.Sequential(Lookalike()))
    assert report.refused["unit_length"] == "nothing in the model fits"


def test_the_templates_wrong_kernel_is_refused(template: dict[str, Any]) -> None:
    def kernel(self: Any, facts: Any, observation: Any) -> Any:
        return lambda x: x / (x.abs().sum(-1, keepdim=True) + facts.eps)

    wrong = type("Wrong", (template["UnitLength"],), {"kernel": kernel})
    report = run({**template, "UnitLength": wrong}, nn.Sequential(RowByRow()))
    assert report.kept == ()
    assert "on the module's own input the kernel is" in report.refused["unit_length"]


def test_the_page_names_every_structure_and_its_kind() -> None:
    rows = dict(re.findall(r"^\| (`.*?`) \| (\w+) \|", PAGE, re.MULTILINE))
    listed = {name: kind for names, kind in rows.items() for name in re.findall(r"`(\w+)`", names)}
    assert listed == {structure.name: structure.kind for structure in available_structures()}
    assert all(isinstance(s, ModuleStructure) or s.find.__doc__ for s in available_structures())
