"""The whole way: discovered, gated, active, detached; and what must never become active."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from flashrt_ros.accelerate import AccelerateError, Gates, accelerate, available_structures, registered
from flashrt_ros.accelerate.calls import complete_call
from flashrt_ros.accelerate.observe import observe
from flashrt_ros.accelerate.structure import Match, Plain, Scene, Site
from test.accelerate.models import (
    MODELS,
    QUICK,
    WIDTH,
    FastScale,
    PlantedNorm,
    RowByRowNorm,
    bits,
    examples,
    mlp,
    traces,
    transformer,
    two_scales,
)


def test_a_norm_that_is_written_wastefully_is_found_and_replaced() -> None:
    model, inputs = transformer(), examples()
    with torch.no_grad():
        before = [model(x) for x in inputs]
    report = accelerate(model, inputs, gates=QUICK)
    assert "fused_norm" in report.kept
    assert report.speedup > 2
    kept = next(v for v in report.receipt.candidates if v.name == "fused_norm")
    assert kept.sites == ("0.norm", "1.norm")
    with torch.no_grad():
        for x, expected in zip(inputs, before, strict=True):
            torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


def test_structures_are_found_by_what_modules_compute_not_by_their_names() -> None:
    report = accelerate(transformer(), examples(), gates=QUICK)
    report.detach()
    sites = {v.name: v.sites for v in report.receipt.candidates}
    assert sites["packed_gated_mlp"] == ("0.mlp", "1.mlp")
    assert {"0.attention.q", "0.attention.k", "0.attention.v"} <= set(sites["packed_linears"])
    assert not any(".o" in site for site in sites["packed_linears"])


def test_a_module_that_only_looks_like_a_norm_is_not_taken_for_one() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain, self.eps = nn.Parameter(torch.randn(WIDTH)), 1e-6

        def forward(self, x: Tensor) -> Tensor:
            return x * self.gain + self.eps

    report = accelerate(nn.Sequential(Sum()).eval(), examples(), gates=QUICK)
    assert report.refused["fused_norm"] == "nothing in the model fits"


@pytest.mark.parametrize("build", MODELS)
def test_detaching_gives_the_model_back_bit_for_bit(build: Callable[[], nn.Sequential]) -> None:
    model, inputs = build(), examples()
    model[0].register_buffer("kept", torch.arange(3.0))
    handle = model.register_forward_hook(lambda *_: None)
    state, marks, outputs = bits(model), traces(model), [model(x) for x in inputs]
    with accelerate(model, inputs, gates=QUICK) as report:
        assert report.kept
        assert bits(model) == state
        assert traces(model) != marks
    assert not report.active
    assert bits(model) == state
    assert traces(model) == marks
    assert all(torch.equal(model(x), expected) for x, expected in zip(inputs, outputs, strict=True))
    handle.remove()


def test_an_instances_own_forward_comes_back() -> None:
    model = mlp()
    own: Callable[[Tensor], Tensor] = type(model[1]).forward.__get__(model[1])
    model[1].forward = own
    with accelerate(model, examples(), gates=QUICK) as report:
        assert "fused_norm" in report.kept
        assert model[1].forward is not own
    assert model[1].forward is own


def test_random_numbers_of_the_process_go_on_as_if_nothing_had_happened() -> None:
    torch.manual_seed(4)
    expected = torch.rand(3)
    model = mlp()
    torch.manual_seed(4)
    accelerate(model, examples(), gates=QUICK).detach()
    assert torch.equal(torch.rand(3), expected)


WRONG_AT_ITS_SITE: dict[str, Callable[[Tensor], Tensor]] = {
    "too large by a tenth": lambda y: y * 1.1,
    "one dimension negated": lambda y: torch.cat((y[..., :-1], -y[..., -1:]), -1),
    "not a number": lambda y: y * float("nan"),
    "one value infinite": lambda y: y.index_fill(-1, torch.tensor([0]), float("inf")),
    "rows exchanged": lambda y: y.roll(1, -2),
    "noise": lambda y: y + 0.2 * torch.rand_like(y),
}


@pytest.mark.parametrize("build", MODELS)
@pytest.mark.parametrize("fault", WRONG_AT_ITS_SITE)
def test_a_wrong_kernel_planted_in_the_registry_is_refused_in_every_model(
    build: Callable[[], nn.Sequential], fault: str
) -> None:
    model, inputs = build(), examples()
    outputs = [model(x) for x in inputs]
    with registered(PlantedNorm("planted", WRONG_AT_ITS_SITE[fault])), accelerate(model, inputs, gates=QUICK) as report:
        assert "on the module's own input the kernel is" in report.refused["planted"]
        assert "planted" not in report.kept
    assert all(torch.equal(model(x), expected) for x, expected in zip(inputs, outputs, strict=True))


class FaultyLater:
    """Right on the first input, which is the one that a kernel is tried out on."""

    def __init__(self, fault: Callable[[Tensor], Tensor]) -> None:
        self._fault, self._calls = fault, 0

    def __call__(self, y: Tensor) -> Tensor:
        self._calls += 1
        return y if self._calls == 1 else self._fault(y)


WRONG_IN_THE_CALL: dict[str, Callable[[Tensor], Tensor]] = {
    "too large by a tenth": lambda y: y * 1.1,
    "one dimension negated": lambda y: torch.cat((y[..., :-1], -y[..., -1:]), -1),
    "not a number": lambda y: y * float("nan"),
    "rows exchanged": lambda y: y.roll(1, -2),
    "half precision's worst": lambda y: y + 0.3 * torch.rand_like(y),
}


@pytest.mark.parametrize("fault", WRONG_IN_THE_CALL)
def test_a_wrong_kernel_that_passes_its_trial_is_refused_by_the_parity_gate(fault: str) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(RowByRowNorm(), nn.Linear(WIDTH, 8)).eval()
    planted = PlantedNorm("planted", FaultyLater(WRONG_IN_THE_CALL[fault]))
    with registered(planted), accelerate(model, examples(), gates=QUICK) as report:
        verdict = next(v for v in report.receipt.candidates if v.name == "planted")
        assert verdict.verdict == "refused"
        assert verdict.parity is not None
        assert not verdict.parity["passed"]
        assert verdict.latency is None


def test_a_right_kernel_that_is_slower_is_refused() -> None:
    def slowly(y: Tensor) -> Tensor:
        for _ in range(3000):
            y = y + 0
        return y

    with registered(PlantedNorm("slow", slowly)), accelerate(mlp(), examples(), gates=QUICK) as report:
        assert "the original's speed" in report.refused["slow"]
        assert "slow" not in report.kept


def test_a_kernel_that_raises_is_refused_with_its_error() -> None:
    def broken(y: Tensor) -> Tensor:
        raise RuntimeError("no such kernel here")

    with registered(PlantedNorm("broken", broken)), accelerate(mlp(), examples(), gates=QUICK) as report:
        assert report.refused["broken"] == "cannot be prepared: no such kernel here"


def test_a_set_that_passes_alone_and_fails_together_is_searched() -> None:
    model, inputs = two_scales(), examples()
    # Each is 3 % too large, which the limit of 5 % allows; both are 6 %.
    with (
        registered(FastScale("a", 0.03)),
        registered(FastScale("b", 0.03)),
        accelerate(model, inputs, gates=QUICK) as report,
    ):
        assert len(report.kept) == 1
        (other,) = {"fast_scale_a", "fast_scale_b"} - set(report.kept)
        assert report.refused[other].startswith("passes alone, but fast_scale_")
        assert "relative error of dimension" in report.refused[other]
        tried = report.receipt.search["tried"]
        assert {frozenset(t["names"]) for t in tried} >= {frozenset({"fast_scale_a", "fast_scale_b"})}
        assert report.receipt.search["exhausted"]


def test_a_set_that_passes_together_is_kept_whole() -> None:
    with (
        registered(FastScale("a", 0)),
        registered(FastScale("b", 0)),
        accelerate(two_scales(), examples(), gates=QUICK) as report,
    ):
        assert set(report.kept) == {"fast_scale_a", "fast_scale_b"}


def test_nothing_is_changed_where_nothing_passes() -> None:
    model, inputs = transformer(), examples()
    marks = traces(model)
    report = accelerate(model, inputs, gates=replace(QUICK, speedup=1e6))
    assert report.kept == ()
    assert report.speedup == 1
    assert traces(model) == marks


def test_a_model_that_disagrees_with_itself_is_not_judged() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x.roll(self.calls, 1)

    with pytest.raises(AccelerateError, match="gives another result when it is called again"):
        accelerate(Counter(), examples(), gates=QUICK)


def test_random_numbers_inside_the_model_are_no_obstacle() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.inner(x + torch.randn_like(x))
            return result

    assert "fused_norm" in accelerate(Noisy().eval(), examples(), gates=QUICK).kept


def test_misuse_is_named() -> None:
    model = mlp()
    with pytest.raises(AccelerateError, match="is a list of examples|must be a list of examples"):
        accelerate(model, examples()[0])  # type: ignore[arg-type]
    with pytest.raises(AccelerateError, match="example_inputs is empty"):
        accelerate(model, [])
    with pytest.raises(AccelerateError, match="has no method 'act'"):
        accelerate(model, examples(), method="act")
    with pytest.raises(AccelerateError, match="unknown kind 'kernels'"):
        accelerate(model, examples(), kinds=("kernels",))
    with pytest.raises(AccelerateError, match=r"expected torch\.nn\.Module"):
        accelerate(lambda x: x, examples())  # type: ignore[arg-type]
    with pytest.raises(AccelerateError, match="requires gradients"):
        accelerate(model, [examples()[0].requires_grad_()])
    with pytest.raises(AccelerateError, match="gate 'rounds' is 3"):
        Gates(rounds=3)
    report = accelerate(model, examples(), gates=QUICK)
    with pytest.raises(AccelerateError, match="accelerated already; detach it first"):
        accelerate(model, examples())
    for copying in (copy.deepcopy, pickle.dumps):
        with pytest.raises(AccelerateError, match="detach it first"):
            copying(model)
    report.detach()
    copy.deepcopy(model)


def test_names_in_the_registry_are_unique() -> None:
    names = [structure.name for structure in available_structures()]
    assert len(names) == len(set(names))
    with pytest.raises(AccelerateError, match="registered already"), registered(PlantedNorm("fused_norm", lambda y: y)):
        pass


def test_many_threads_get_the_originals_results() -> None:
    model, inputs = transformer(), examples()
    outside = examples(count=1, rows=5)[0]
    with torch.no_grad():
        wanted = {id(x): model(x) for x in (*inputs, outside)}
    report = accelerate(model, inputs, gates=replace(QUICK, misses=10_000))
    close: list[bool] = []

    def work() -> None:
        with torch.inference_mode():
            calls = (*inputs, outside) * 5
            close.extend(torch.allclose(model(x), wanted[id(x)], rtol=1e-4, atol=1e-4) for x in calls)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert close == [True] * 120
    norms = [tally for tally in report.tallies if tally.site.endswith(".norm")]
    assert [sum(tally.misses.values()) for tally in norms] == [30, 30]
    assert not any(tally.detached for tally in report.tallies)


def test_a_method_is_observed_though_its_modules_have_used_up_the_memory_for_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = transformer()

        def act(self, x: Tensor) -> Tensor:
            result: Tensor = self.inside(x)
            return result

    class Acting(Plain):
        def methods(self, model: nn.Module) -> Iterable[Site]:
            return [Site("", model, "act")]

        def watches(self, module: nn.Module) -> bool:
            return True

        def find(self, scene: Scene) -> Iterable[Match]:
            return ()

    x = examples()[0]
    monkeypatch.setattr("flashrt_ros.accelerate.observe._MOST_BYTES", 3 * x.numel() * x.element_size())
    scene = observe(complete_call(Policy().eval(), "act", [x]), [Acting()])
    observed = {site.name for site, seen in scene.seen.items() if seen.observations}
    assert "act" in observed
    assert "inside" not in observed  # ends last but one, when nothing was left
    assert len(observed) > 1
