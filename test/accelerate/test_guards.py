"""Calls that were not measured run the original, are counted, and in the end switch a site off."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashrt_ros.accelerate import ModuleStructure, Observation, Report, accelerate, registered
from flashrt_ros.accelerate.errors import Outside
from flashrt_ros.accelerate.guards import Guard
from test.accelerate.models import QUICK, ROWS, WIDTH, RowByRowNorm, bits, examples, mlp, transformer
from test.accelerate.operations import OperationCount

PATIENT = replace(QUICK, misses=4)


@pytest.fixture
def model() -> nn.Sequential:
    return mlp()


@pytest.fixture
def report(model: nn.Sequential) -> Iterator[Report]:
    with accelerate(model, examples(), gates=PATIENT) as report:
        assert report.kept == ("fused_norm",)
        yield report


def misses(report: Report) -> dict[str, int]:
    (tally,) = report.tallies
    return dict(tally.misses)


OTHER = "shape, dtype, device, strides or a plain argument differ from the examples'"
OUTSIDE: dict[str, Callable[[], Tensor]] = {
    "shape": lambda: torch.randn(1, ROWS + 1, WIDTH),
    "dtype": lambda: torch.randn(1, ROWS, WIDTH, dtype=torch.float64),
    "strides": lambda: torch.randn(1, WIDTH, ROWS).transpose(1, 2),
    "rank": lambda: torch.randn(ROWS, WIDTH),
}


@pytest.mark.parametrize("what", OUTSIDE)
def test_a_call_outside_runs_the_original_and_is_counted(what: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(RowByRowNorm()).eval()  # a product would make the strides the examples' again
    x = OUTSIDE[what]()
    with torch.no_grad():
        expected = model(x)
        with accelerate(model, examples(), gates=PATIENT) as report:
            assert report.kept == ("fused_norm",)
            assert torch.equal(model(x), expected)
            assert misses(report) == {OTHER: 1}


def test_calls_inside_are_not_counted(model: nn.Sequential, report: Report) -> None:
    with torch.no_grad():
        for x in examples(5):
            model(x)
    assert misses(report) == {}


def test_calls_of_several_accepted_kinds_may_alternate() -> None:
    torch.manual_seed(0)
    model, inputs = nn.Sequential(RowByRowNorm()).eval(), [*examples(2), *examples(2, rows=ROWS // 2)]
    other = torch.randn(1, ROWS // 4, WIDTH)
    with torch.no_grad(), accelerate(model, inputs, gates=PATIENT) as report:
        assert report.kept == ("fused_norm",)
        for x in (*inputs, *reversed(inputs), inputs[0], inputs[3], inputs[1]):
            model(x)
        assert misses(report) == {}
        model(other)
        assert misses(report) == {OTHER: 1}


def test_after_some_calls_outside_in_a_row_the_site_detaches_itself_and_says_so(
    model: nn.Sequential, report: Report, caplog: pytest.LogCaptureFixture
) -> None:
    inside, outside = examples()[0], torch.randn(1, 3, WIDTH)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "flashrt_ros.accelerate"):
        for x in (outside, outside, outside, inside, outside, outside, outside):
            model(x)
        assert not report.tallies[0].detached
        assert not caplog.records
        model(outside)
        assert report.tallies[0].detached == f"4 calls outside the guard in a row, the last: {OTHER}"
        assert caplog.messages == [f"1 runs the original from now on: {report.tallies[0].detached}"]
        model(outside)
        assert misses(report) == {OTHER: 7}
        report.detach()
        with accelerate(model, examples(), gates=PATIENT):
            pass


def test_gradients_are_the_originals(model: nn.Sequential) -> None:
    x = examples()[0]

    def gradients() -> list[Tensor]:
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        model(leaf).square().sum().backward()
        found = [leaf.grad, *(parameter.grad for parameter in model.parameters())]
        return [gradient.clone() for gradient in found if gradient is not None]

    expected = gradients()
    with accelerate(model, examples(), gates=PATIENT) as report:
        assert all(torch.equal(a, b) for a, b in zip(gradients(), expected, strict=True))
        assert misses(report) == {"gradients are asked for": 1}
    assert len(expected) == 6


def test_a_training_step_in_the_middle_is_noticed(model: nn.Sequential, report: Report) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    model(examples()[0]).square().sum().backward()
    optimiser.step()
    with torch.no_grad():
        accelerated = model(examples()[0])
    assert misses(report) == {"gradients are asked for": 1, "weights were changed in place": 1}
    report.detach()
    with torch.no_grad():
        assert torch.equal(accelerated, model(examples()[0]))


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "weights were loaded anew": lambda model: model.load_state_dict(mlp(seed=1).state_dict()),
    "weights were moved or converted": lambda model: model.to(torch.float64).to(torch.float32),
    "training mode was switched": lambda model: model.train(),
}


@pytest.mark.parametrize("reason", CHANGES)
def test_a_changed_model_runs_the_original(model: nn.Sequential, report: Report, reason: str) -> None:
    x = examples()[0]
    CHANGES[reason](model)
    with torch.no_grad():
        result = model(x)
        assert misses(report) == {reason: 1}
        report.detach()
        assert torch.equal(result, model(x))


def test_assigned_weights_are_noticed(model: nn.Sequential, report: Report) -> None:
    model.load_state_dict(mlp(seed=1).state_dict(), assign=True)
    with torch.no_grad():
        model(examples()[0])
    assert misses(report) == {"weights were loaded anew": 1}


def test_weights_that_are_looked_at_after_the_call_make_its_result_void(model: nn.Sequential, report: Report) -> None:
    assert report._live is not None
    guard, x = report._live.guarded[0].guard, examples()[0]
    guard._device = "cuda"  # as a guard on a GPU decides; only the order differs
    with torch.no_grad():
        model(x)
        assert misses(report) == {}
        for parameter in model.parameters():
            parameter.mul_(1.5)
        results = [model(x) for _ in range(2)]
        assert misses(report) == {"weights were changed in place": 2}
        report.detach()
        assert all(torch.equal(result, model(x)) for result in results)


def test_moved_weights_are_not_even_read(model: nn.Sequential, report: Report) -> None:
    assert report._live is not None
    guarded = report._live.guarded[0]
    guarded.guard._device = "cuda"
    guarded._call = _never
    model.to(torch.float64).to(torch.float32)
    with torch.no_grad():
        model(examples()[0])
    assert misses(report) == {"weights were moved or converted": 1}


def _never(*_: object) -> Tensor:
    raise AssertionError("memory of weights that have moved was read")


def test_autocasting_runs_the_original(model: nn.Sequential, report: Report) -> None:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(examples()[0])
    assert misses(report) == {"autocasting was switched": 1}


def test_inference_mode_is_as_good_as_no_grad(model: nn.Sequential, report: Report) -> None:
    x = examples()[0]
    with torch.no_grad():
        expected = model(x)
    with torch.inference_mode():
        assert torch.equal(model(x), expected)
    assert misses(report) == {}


class Nested(nn.Module):
    """Calls itself on the first half of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = RowByRowNorm()

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] < ROWS:
            small: Tensor = self.norm(x)
            return small
        half = self(x[:, : ROWS // 2].contiguous())
        result: Tensor = self.norm(x) + torch.cat((half, half), 1)
        return result


class NestedKernel(ModuleStructure[Nested]):
    """Does it in two operations, and calls the module again for the half."""

    name = "nested"
    kind = "precision"  # the only one of its kind on a CPU, so that nothing else can be chosen

    def hypotheses(self, module: nn.Module) -> Iterable[Nested]:
        if isinstance(module, Nested):
            yield module

    def reference(self, facts: Nested, x: Tensor) -> Tensor:
        return Nested.forward(facts, x)

    def kernel(self, facts: Nested, observation: Observation) -> Callable[..., Tensor]:
        weight = (1 + facts.norm.gain).detach()

        def call(x: Tensor) -> Tensor:
            y = torch.nn.functional.rms_norm(x, (WIDTH,), weight, facts.norm.eps)
            if x.shape[1] < ROWS:
                return y
            half = facts(x[:, : ROWS // 2].contiguous())
            return y + torch.cat((half, half), 1)

        return call


def test_a_site_may_be_entered_again_from_within() -> None:
    torch.manual_seed(0)
    model, inputs = Nested().eval(), examples()
    with torch.no_grad():
        expected = model(inputs[0])
    with registered(NestedKernel()), accelerate(model, inputs, gates=QUICK, kinds=("precision",)) as report:
        assert report.kept == ("nested",)
        with torch.no_grad():
            torch.testing.assert_close(model(inputs[0]), expected, rtol=1e-5, atol=1e-5)
        assert misses(report) == {OTHER: 1}  # the call for the half


class Choosy(RowByRowNorm):
    pass


class ChoosyKernel(ModuleStructure[Choosy]):
    name = "choosy"
    kind = "precision"

    def hypotheses(self, module: nn.Module) -> Iterable[Choosy]:
        if isinstance(module, Choosy):
            yield module

    def reference(self, facts: Choosy, x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, (WIDTH,), 1 + facts.gain, facts.eps)

    def kernel(self, facts: Choosy, observation: Observation) -> Callable[..., Tensor]:
        def call(x: Tensor) -> Tensor:
            if bool((x == 0).all()):
                raise Outside("the input is all zero")
            return self.reference(facts, x).detach()

        return call


def test_a_kernel_may_refuse_values_and_the_original_runs() -> None:
    torch.manual_seed(0)
    model, zeros = nn.Sequential(Choosy()).eval(), torch.zeros(1, ROWS, WIDTH)
    with registered(ChoosyKernel()), torch.no_grad():
        expected = model(zeros)
        with accelerate(model, examples(), gates=QUICK, kinds=("precision",)) as report:
            assert report.kept == ("choosy",)
            assert torch.equal(model(zeros), expected)
            assert misses(report) == {"the input is all zero": 1}


def test_guards_decide_without_an_operation_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    reason, counts = Guard.reason, []

    def counting(self: Guard, args: Any, kwargs: Any) -> str | None:
        with OperationCount() as operations:
            found = reason(self, args, kwargs)
        counts.append(operations.count)
        return found

    monkeypatch.setattr(Guard, "reason", counting)
    model, inputs = transformer(), examples()
    with accelerate(model, inputs, gates=QUICK) as report, torch.no_grad():
        counts.clear()
        model(inputs[0])
        assert counts == [0] * len(report.tallies) != []
        assert report.guard_ms > 0


def test_other_calls_of_the_process_are_unaffected(model: nn.Sequential, report: Report) -> None:
    other = mlp()
    assert bits(other) == bits(model)
    assert "forward" not in vars(other[1])
