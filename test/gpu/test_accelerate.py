"""Drop-in acceleration on a GPU: graphs of complete calls, the kernels behind structures, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashrt_ros.accelerate import AccelerateError, Gates, Observation, accelerate, registered, replay
from flashrt_ros.accelerate.calls import seeded
from flashrt_ros.accelerate.errors import CaptureError
from flashrt_ros.accelerate.graph import CapturedCall
from flashrt_ros.accelerate.structures.fp8_linear import Fp8Linear, quantised
from flashrt_ros.accelerate.structures.mlp import GegluKernel, GeluEpilogue, row_geglu
from flashrt_ros.accelerate.structures.norms import row_layer_norm, row_rms_norm
from flashrt_ros.policies.pi05.cuda_plan import PARTS
from test.accelerate.models import FastScale, PlantedNorm, RowByRowNorm, bits, qwen3, traces, two_scales, with_padding
from test.gpu.fused import DEVICE, NEEDS_KERNELS, distance
from test.gpu.short import short_pi05

pytestmark = NEEDS_KERNELS

GATES = Gates(rounds=7, turn_s=0.01)
BOUND = 2.5e-3


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


class Call(nn.Module):
    """Everything that keeps eager code out of a graph: host constants, a loop with its own times, chance, a mask."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.time = nn.Linear(1, width)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.tensor([[0.0] * 8 for _ in range(x.shape[0])], device=x.device).bool()
        positions = torch.zeros(8, dtype=torch.long, device=x.device)
        positions[torch.tensor([True] * 4 + [False] * 4, device=x.device)] = torch.arange(4, device=x.device)
        for step in range(4):
            time = torch.tensor([1 - step / 4], device=x.device)
            x = x + 0.1 * self.inner(x + self.time(time)) + 0.01 * torch.randn_like(x)
        return x + positions.sum() + mask.sum()


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Call().to(DEVICE).eval()


INPUTS = [draw(64, 256, seed=seed) for seed in range(3)] if torch.cuda.is_available() else []


def test_a_whole_call_becomes_one_graph_and_keeps_its_random_numbers(model: nn.Module) -> None:
    with torch.no_grad():
        expected = []
        for index, x in enumerate(INPUTS):
            with seeded(index, DEVICE):
                expected.append(model(x))
    state, marks = bits(model), traces(model)
    with accelerate(model, INPUTS, gates=GATES) as report, torch.no_grad():
        assert "cuda_graph" in report.kept
        for index, x in enumerate(INPUTS):
            with seeded(index, DEVICE):
                torch.testing.assert_close(model(x), expected[index], rtol=1e-4, atol=1e-4)
        assert not torch.equal(model(INPUTS[0]), model(INPUTS[0]))
        assert model(draw(3, 256)).shape == (3, 256)
        assert sum(sum(tally.misses.values()) for tally in report.tallies if tally.site == "(the model)") == 1
        assert report.guard_ms > 0
    assert traces(model) == marks
    assert bits(model) == state


def test_changed_weights_run_the_original() -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.GELU())]
    model = nn.Sequential(*layers).to(DEVICE).eval()
    with accelerate(model, INPUTS, gates=GATES) as report, torch.no_grad():
        assert "cuda_graph" in report.kept
        tally = next(tally for tally in report.tallies if tally.site == "(the model)")
        for parameter in model.parameters():
            parameter.mul_(1.5)
        changed = model(INPUTS[0])
        assert dict(tally.misses) == {"weights were changed in place": 1}
        moved = model.cpu().to(DEVICE)(INPUTS[0])
        assert tally.misses["weights were moved or converted"] == 1
    with torch.no_grad():
        expected = model(INPUTS[0])
    torch.testing.assert_close(changed, expected)
    torch.testing.assert_close(moved, expected)


def test_results_of_a_graph_are_the_callers_own(model: nn.Module) -> None:
    call = CapturedCall(model, ((INPUTS[0],), {}), DEVICE)
    first = call(INPUTS[0])
    kept = first.clone()
    call(INPUTS[1])
    assert torch.equal(first, kept)


def test_threads_and_streams_do_not_see_each_others_inputs() -> None:
    def double(x: Tensor) -> Tensor:
        for _ in range(20):
            x = (x @ torch.eye(256, device=x.device)) + 1
        return x

    call = CapturedCall(double, ((INPUTS[0],), {}), DEVICE)
    wrong: list[int] = []

    def work(index: int) -> None:
        x = torch.full((64, 256), float(index), device=DEVICE)
        with torch.cuda.stream(torch.cuda.Stream()), torch.inference_mode():  # type: ignore[no-untyped-call]
            x.record_stream(torch.cuda.current_stream())
            wrong.extend(index for _ in range(30) if not bool((call(x) == index + 20).all()))

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_by_any_of_torchs_backends_is_captured(dtype: torch.dtype, masked: bool) -> None:
    def attend(x: Tensor) -> Tensor:
        mask = torch.ones(48, 48, device=x.device, dtype=torch.bool).tril() if masked else None
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    inputs = [draw(1, 4, 48, 72, seed=seed, dtype=dtype) for seed in range(2)]
    call = CapturedCall(attend, ((inputs[0],), {}), DEVICE)
    for x in inputs:
        assert torch.equal(call(x), attend(x))


def test_transformers_take_eagers_path_in_a_graph_and_give_eagers_bits() -> None:
    pytest.importorskip("transformers", reason="transformers are not installed here")
    language, examples = qwen3(DEVICE, torch.bfloat16)
    call = CapturedCall(language, ((), examples[0]), DEVICE)
    assert not call._recording.capturing
    for example in examples:
        with torch.no_grad():
            expected = language(**example)
        assert torch.equal(call(**example).logits, expected.logits)


def test_transformers_padding_is_captured_on_the_path_for_graphs() -> None:
    pytest.importorskip("transformers", reason="transformers are not installed here")
    language, examples = qwen3(DEVICE, torch.bfloat16)
    padded = with_padding(examples)
    call = CapturedCall(language, ((), padded[0]), DEVICE)
    assert call._recording.capturing
    for example in padded:
        with torch.no_grad():
            expected = language(**example)
        assert distance(call(**example).logits.double(), expected.logits.double()) < 0.05


def test_a_language_model_is_kept_as_a_graph_at_the_default_gates() -> None:
    pytest.importorskip("transformers", reason="transformers are not installed here")
    language, examples = qwen3(DEVICE, torch.bfloat16)
    with accelerate(language, examples, gates=GATES, kinds=("graph",)) as report:
        assert report.kept == ("cuda_graph",)
        assert report.receipt.result["parity"]["dimension_error"] == 0


def test_lerobots_pi05_runs_on_the_fused_stages() -> None:
    pytest.importorskip("lerobot", reason="LeRobot is not installed here")
    workload = short_pi05(DEVICE)
    policy: Any = workload.model
    examples = workload.examples
    with accelerate(policy, examples, method=workload.method, gates=GATES, kinds=("policy",)) as report:
        verdict = next(v for v in report.receipt.candidates if v.name == "pi05_stages")
        assert report.kept == ("pi05_stages",), verdict
        references = {f"sample_actions: {part}" for part in PARTS} & set(verdict.dropped)
        assert not references, verdict.dropped
        for count in (30, 70, 200):
            example = {**examples[0][1], "masks": (torch.arange(200, device=DEVICE) < count)[None]}
            expected = type(policy).sample_actions(policy, **example)
            assert distance(policy.sample_actions(**example).double(), expected.double()) < 0.02
        assert not any(tally.misses for tally in report.tallies)
        assert report.guard_ms > 0


def waiting(x: Tensor) -> Tensor:
    torch.cuda.synchronize()
    return x + 1


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "a host decision": lambda x: x * 2 if x.sum() > 0 else x,
    "a mask as index": lambda x: x[x > 0],
    "chance on the host": lambda x: x + torch.rand(256).to(x.device),
    "a copy to the host": lambda x: x.cpu().to(x.device),
    "waiting": waiting,
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_captured_is_refused_and_the_gpu_goes_on(what: str) -> None:
    with pytest.raises(CaptureError, match="to or from the host|waits for the GPU"):
        CapturedCall(REFUSED[what], ((INPUTS[0],), {}), DEVICE)
    assert bool((INPUTS[0] + 1).isfinite().all())


def test_a_wrong_kernel_is_refused_within_a_graph_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(RowByRowNorm(256), nn.Linear(256, 8)).to(DEVICE).eval()
    with registered(PlantedNorm("planted", lambda y: y * 1.1)), accelerate(model, INPUTS, gates=GATES) as report:
        assert "planted" in report.refused
        assert "planted" not in report.kept


def test_a_set_that_fails_together_is_split_within_a_graph_too() -> None:
    model = two_scales().to(DEVICE)
    inputs = [draw(1, 64, 64, seed=seed) for seed in range(3)]
    with registered(FastScale("a", 0.03)), registered(FastScale("b", 0.03)):
        report = accelerate(model, inputs, gates=GATES)
    assert len({"fast_scale_a", "fast_scale_b"} & set(report.kept)) <= 1


def test_a_receipt_is_replayed_with_its_graph(model: nn.Module) -> None:
    report = accelerate(model, INPUTS, gates=GATES)
    report.detach()
    with replay(model, report.receipt, INPUTS) as again:
        assert "cuda_graph" in again.kept
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1
    with pytest.raises(AccelerateError, match=r"model\.weights"):
        replay(model, report.receipt, INPUTS)


@pytest.mark.parametrize("rows", [1, 77])
def test_norms_as_operations(rows: int) -> None:
    x, weight, bias = (draw(*shape, dtype=torch.bfloat16) for shape in ((2, rows, 1152), (1152,), (1152,)))
    expected = F.layer_norm(x.double(), (1152,), weight.double(), bias.double(), 1e-6)
    assert distance(row_layer_norm(x, weight, bias, 1e-6).double(), expected) < BOUND
    modulation = draw(3, 1152)
    normed = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6)
    expected = normed * (1 + modulation[0].double()) + modulation[1].double()
    assert distance(row_rms_norm(x, modulation, 1e-6).double(), expected) < BOUND


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "parts of wider rows": lambda x: torch.cat((x, x + 1), -1)[..., : x.shape[-1]],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_norms_of_rows_that_are_not_dense_have_the_bits_of_dense_ones(layout: str) -> None:
    x, weight, bias = (draw(*shape, dtype=torch.bfloat16) for shape in ((1, 77, 1152), (1152,), (1152,)))
    spread = LAYOUTS[layout](x)
    assert not spread.is_contiguous()
    assert torch.equal(spread, x)
    assert torch.equal(row_layer_norm(spread, weight, bias, 1e-6), row_layer_norm(x, weight, bias, 1e-6))
    modulation = draw(3, 1152)
    assert torch.equal(row_rms_norm(spread, modulation, 1e-6), row_rms_norm(x, modulation, 1e-6))


def test_rows_that_begin_anywhere_have_the_bits_of_aligned_ones() -> None:
    x, gate_up = draw(77, 1152, dtype=torch.bfloat16), draw(33, 8192, dtype=torch.bfloat16)

    def shifted(tensor: Tensor) -> Tensor:
        return torch.cat((tensor.flatten()[:1], tensor.flatten()))[1:].view(tensor.shape)

    modulation = draw(3, 1152)
    assert torch.equal(row_rms_norm(shifted(x), modulation, 1e-6), row_rms_norm(x, modulation, 1e-6))
    assert torch.equal(row_geglu(shifted(gate_up)), row_geglu(gate_up))


def test_geglu_as_an_operation() -> None:
    gate_up = draw(1, 33, 8192, dtype=torch.bfloat16)
    gate, up = gate_up.double().chunk(2, -1)
    assert distance(row_geglu(gate_up).double(), F.gelu(gate, approximate="tanh") * up) < BOUND


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(1152, 4304), nn.Linear(4304, 1152)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc2(F.gelu(self.fc1(x), approximate="tanh"))
        return result


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(1152, 4096, bias=False) for _ in range(2))
        self.down = nn.Linear(4096, 1152, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.gelu(self.gate(x), approximate="tanh") * self.up(x))
        return result


def test_structures_are_found_and_their_kernels_agree() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(1152), Mlp(), nn.LayerNorm(1152), Gated()).to(DEVICE, torch.bfloat16).eval()
    inputs = [draw(1, 256, 1152, seed=seed, dtype=torch.bfloat16) for seed in range(3)]
    report = accelerate(model, inputs, gates=GATES)
    report.detach()
    verdicts = {v.name: v for v in report.receipt.candidates}
    for name in ("row_norm", GegluKernel.name, GeluEpilogue.name, "packed_gated_mlp", Fp8Linear.name):
        assert verdicts[name].sites, name
        assert not verdicts[name].dropped, name
    for name in ("row_norm", GegluKernel.name, GeluEpilogue.name, "packed_gated_mlp"):
        parity = verdicts[name].parity
        assert parity is not None, name
        assert parity["passed"], name
    print({name: (v.verdict, v.reason, v.latency) for name, v in verdicts.items()})


def test_fp8_products_are_as_exact_as_their_format() -> None:
    layer = nn.Linear(1152, 1024, device=DEVICE, dtype=torch.bfloat16)
    x = draw(64, 1152, dtype=torch.bfloat16)
    values, scales = quantised(x)
    assert distance(values.double() * scales, x.double()) < 0.04
    call = Fp8Linear().kernel(layer, Observation((x,), {}, layer(x)))
    assert distance(call(x).double(), layer(x).double()) < 0.06
