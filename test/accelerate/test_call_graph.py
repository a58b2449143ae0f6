"""A captured complete call as a candidate among others. On a CPU its operations run again, without the constant ones.

No CPU gains from that in general; this model does, as almost all of its work depends on nothing.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flashrt_ros.accelerate import Report, accelerate, replay
from flashrt_ros.accelerate.structures.call_graph import CallGraph
from test.accelerate.models import QUICK, WIDTH, RowByRowNorm, bits, examples, traces

ROWS, TABLE = 6, 256


class Tables(nn.Module):
    """Makes its table anew in every call, as eager code does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = RowByRowNorm(), nn.Linear(WIDTH, 8)
        self.register_buffer("base", torch.randn(TABLE, TABLE) / 16)

    def forward(self, x: Tensor) -> Tensor:
        table = self.get_buffer("base")
        for step in range(40):
            table = (table @ table + torch.tensor(step / 40)).tanh()
        result: Tensor = self.out(self.norm(x) + table[:WIDTH].mean(1))
        return result


@pytest.fixture(autouse=True)
def graphs_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CallGraph, "available", lambda self, device: "")


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Tables().eval()


def verdict(report: Report, name: str) -> tuple[str, str]:
    found = next(v for v in report.receipt.candidates if v.name == name)
    return found.verdict, found.against


def test_kernels_are_judged_within_the_graph_and_kept_together_with_it(model: nn.Module) -> None:
    inputs = examples(rows=ROWS)
    state, marks = bits(model), traces(model)
    with torch.no_grad():
        expected = [model(x) for x in inputs]
        with accelerate(model, inputs, gates=QUICK) as report:
            assert set(report.kept) == {"cuda_graph", "fused_norm"}
            assert verdict(report, "cuda_graph") == ("kept", "original")
            assert verdict(report, "fused_norm") == ("kept", "cuda_graph")
            for x, result in zip(inputs, expected, strict=True):
                torch.testing.assert_close(model(x), result, rtol=1e-5, atol=1e-5)
            assert {tally.site for tally in report.tallies} == {"norm", "(the model)"}
    assert (bits(model), traces(model)) == (state, marks)


def test_calls_outside_the_graph_run_the_original(model: nn.Module) -> None:
    other = torch.randn(1, 3, WIDTH)
    with torch.no_grad():
        expected = model(other)
        with accelerate(model, examples(rows=ROWS), gates=QUICK) as report:
            torch.testing.assert_close(model(other), expected, rtol=1e-5, atol=1e-5)
            assert sum(sum(tally.misses.values()) for tally in report.tallies if tally.site == "(the model)") == 1


def test_changed_weights_are_not_replayed(model: nn.Module) -> None:
    x = examples(rows=ROWS)[0]
    with torch.no_grad(), accelerate(model, examples(rows=ROWS), gates=QUICK) as report:
        assert "cuda_graph" in report.kept
        model.get_buffer("base").mul_(0.5)  # what the folded table was made of
        result = model(x)
        report.detach()
        torch.testing.assert_close(result, model(x), rtol=1e-5, atol=1e-5)


def test_a_graph_is_replayed_from_its_receipt(model: nn.Module) -> None:
    report = accelerate(model, examples(rows=ROWS), gates=QUICK)
    report.detach()
    with replay(model, report.receipt, examples(rows=ROWS)) as again:
        assert again.kept == report.kept
        assert again.guard_ms > 0


def test_a_call_that_keeps_state_in_python_is_refused() -> None:
    class Queue(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.last = x
            return x * 2

    report = accelerate(Queue().eval(), examples(rows=ROWS), gates=QUICK)
    assert report.refused["cuda_graph"] == "the call changes last, which a replay would not"


def test_a_call_whose_modules_have_hooks_is_refused(model: nn.Module) -> None:
    seen: list[int] = []
    model.get_submodule("norm").register_forward_hook(lambda *_: seen.append(1))
    report = accelerate(model, examples(rows=ROWS), gates=QUICK)
    assert report.refused["cuda_graph"] == "'norm' has forward hooks, which a replay would not run"
    assert "fused_norm" not in report.refused or "hooks" not in report.refused["fused_norm"]
    before = len(seen)
    with report:
        model(examples(rows=ROWS)[0])
    assert len(seen) == before + 1  # the replaced norm's own hook still runs
