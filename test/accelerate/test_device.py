"""Who is blamed where the device reports a fault, and what is told while candidates are judged."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from flashrt_ros.accelerate import AccelerateError, DeviceFaultError, Observation, accelerate, registered, replay
from flashrt_ros.accelerate import device as waiting
from test.accelerate.models import QUICK, FastScale, PlantedNorm, Scale, bits, examples, mlp, traces, two_scales

ILLEGAL = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported later"


class Broken:
    """A device that reports a fault to whoever waits for it, from the moment on at which it was broken."""

    def __init__(self) -> None:
        self.broken = False

    def finish(self, device: torch.device) -> None:
        if self.broken:
            raise RuntimeError(ILLEGAL)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Broken:
    """Stands for the CPU in the place where a fault would be reported: a CPU has none."""
    broken = Broken()
    monkeypatch.setattr(waiting, "finish", broken.finish)
    return broken


def breaking(gpu: Broken, calls: int) -> Callable[[Tensor], Tensor]:
    """A right result, but the device is broken after so many of them."""
    left = calls

    def fault(y: Tensor) -> Tensor:
        nonlocal left
        left -= 1
        gpu.broken = gpu.broken or left <= 0
        return y

    return fault


@pytest.mark.parametrize(
    ("calls", "who"), [(1, "candidate 'culprit', while it was prepared,"), (2, "candidate 'culprit'")]
)
def test_a_candidate_that_breaks_the_device_is_named(gpu: Broken, calls: int, who: str) -> None:
    model = mlp()
    state, marks = bits(model), traces(model)
    with (
        registered(PlantedNorm("innocent", lambda y: y)),
        registered(PlantedNorm("culprit", breaking(gpu, calls))),
        registered(PlantedNorm("never_seen", lambda y: y)),
        pytest.raises(DeviceFaultError, match=rf"^{who} left 'cpu' with a fault: CUDA error: an illegal") as caught,
    ):
        accelerate(model, examples(), gates=QUICK)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, AccelerateError)
    assert bits(model) == state
    assert traces(model) == marks


def test_a_refused_candidate_that_broke_the_device_is_blamed_all_the_same(gpu: Broken) -> None:
    fault = breaking(gpu, 2)

    def raising(y: Tensor) -> Tensor:
        fault(y)
        if gpu.broken:
            raise RuntimeError(ILLEGAL)  # as the next operation on a broken device does
        return y

    with (
        registered(PlantedNorm("culprit", raising)),
        pytest.raises(DeviceFaultError, match="^candidate 'culprit' left"),
    ):
        accelerate(mlp(), examples(), gates=QUICK)


def test_a_set_that_breaks_the_device_only_together_is_named(gpu: Broken) -> None:
    ran: list[str] = []

    class OneOfTwo(FastScale):
        """Does no harm alone, but behind the other one in the same call."""

        def kernel(self, facts: Scale, observation: Observation) -> Callable[..., Tensor]:
            ran.clear()
            call = super().kernel(facts, observation)

            def noting(x: Tensor) -> Tensor:
                gpu.broken = gpu.broken or (ran[-1:] == ["a"] and facts.kind == "b")
                ran.append(facts.kind)
                result: Tensor = call(x)
                return result

            return noting

    model = two_scales()
    model[0].register_forward_pre_hook(lambda *_: ran.append("a call begins"))
    with (
        registered(OneOfTwo("a", 0.0)),
        registered(OneOfTwo("b", 0.0)),
        pytest.raises(DeviceFaultError, match=r"^the set fast_scale_. \+ fast_scale_. left 'cpu' with a fault"),
    ):
        accelerate(model, examples(), gates=QUICK, kinds=("kernel",))


def test_a_model_that_breaks_the_device_by_itself_is_named(gpu: Broken) -> None:
    class Breaking(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            gpu.broken = True
            return super().forward(x)

    with pytest.raises(DeviceFaultError, match="^the original model left"):
        accelerate(Breaking(64, 64).eval(), examples(), gates=QUICK)


def test_a_receipt_whose_set_breaks_the_device_is_named(gpu: Broken) -> None:
    class Breaking(FastScale):
        def kernel(self, facts: Scale, observation: Observation) -> Callable[..., Tensor]:
            call, fault = super().kernel(facts, observation), breaking(gpu, 2)
            return lambda x: fault(call(x))

    model, inputs = two_scales(), examples()
    with registered(FastScale("a", 0.0)):
        report = accelerate(model, inputs, gates=QUICK, kinds=("kernel",))
    report.detach()
    assert report.kept == ("fast_scale_a",)
    message = r"^what the receipt kept \(fast_scale_a\) left 'cpu' with a fault"
    with registered(Breaking("a", 0.0)), pytest.raises(DeviceFaultError, match=message):
        replay(model, report.receipt, inputs)


def test_every_verdict_is_told_before_the_next_candidate_is_judged() -> None:
    steps: list[tuple[str, str]] = []
    report = accelerate(
        mlp(), examples(), gates=QUICK,
        progress=lambda done, total, text: steps.append(("step", text)),
        told=lambda name, found: steps.append((name, found)),
    )  # fmt: skip
    report.detach()
    judged = [index for index, (kind, text) in enumerate(steps) if kind == "step" and text.startswith("judging ")]
    assert judged
    for index in judged:
        text = steps[index][1]
        name = " + ".join(text.removeprefix("judging together: ").removeprefix("judging ").split(", "))
        assert steps[index + 1][0] == name, text
    last = dict(steps)
    for verdict in report.receipt.candidates:
        assert verdict.reason in last[verdict.name]
