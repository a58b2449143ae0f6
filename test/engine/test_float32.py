"""Exact float32 for a while: every switch of the process comes back, whichever way it was set."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from flashrt_ros.contract import Variant
from flashrt_ros.engine import exact_float32, graphs, recording_into
from flashrt_ros.engine.graphs import GraphSet, StageBody

from ..contract.builders import make_contract

backends: Any = torch.backends  # its type information lacks the newer switches
cuda, cudnn, mkldnn = backends.cuda, backends.cudnn, backends.mkldnn
WAIT = 20.0  # seconds until a thread that hangs is a failure


def everywhere(value: str) -> None:
    backends.fp32_precision = value


def by_default() -> None:
    everywhere("none")
    cudnn.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    for switch in (cuda.matmul, mkldnn.matmul, mkldnn.conv, mkldnn.rnn):
        switch.fp32_precision = "none"
    cudnn.allow_tf32 = True


def by_two_older_ones() -> None:
    torch.set_float32_matmul_precision("medium")
    cuda.matmul.allow_tf32 = True


def in_both_ways() -> None:
    """The older switch allows what the newer one forbids: PyTorch refuses to read it."""
    torch.set_float32_matmul_precision("high")
    cuda.matmul.fp32_precision = "ieee"
    cudnn.conv.fp32_precision = "ieee"


SETTINGS: dict[str, Callable[[], None]] = {
    "nothing": lambda: None,
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "allow_tf32": lambda: setattr(cuda.matmul, "allow_tf32", True),
    "medium, then allow_tf32": by_two_older_ones,
    "cudnn.allow_tf32": lambda: setattr(cudnn, "allow_tf32", False),
    "matmul": lambda: setattr(cuda.matmul, "fp32_precision", "tf32"),
    "convolutions": lambda: setattr(cudnn.conv, "fp32_precision", "ieee"),
    "convolutions on the CPU": lambda: setattr(mkldnn.conv, "fp32_precision", "bf16"),
    "everywhere": lambda: everywhere("tf32"),
    "in both ways": in_both_ways,
}


@pytest.fixture(autouse=True)
def _switches() -> Iterator[None]:
    yield
    by_default()


def seen() -> dict[str, Any]:
    """What every switch says, or that PyTorch refuses to read it."""
    switches: dict[str, Callable[[], Any]] = {
        "matmul": lambda: cuda.matmul.fp32_precision,
        "convolution": lambda: cudnn.conv.fp32_precision,
        "recurrent": lambda: cudnn.rnn.fp32_precision,
        "matmul on the CPU": lambda: mkldnn.matmul.fp32_precision,
        "convolution on the CPU": lambda: mkldnn.conv.fp32_precision,
        "recurrent on the CPU": lambda: mkldnn.rnn.fp32_precision,
        "everywhere": lambda: backends.fp32_precision,
        "older matmul": torch.get_float32_matmul_precision,
        "older TF32": lambda: cuda.matmul.allow_tf32,
        "older cuDNN": lambda: cudnn.allow_tf32,
    }
    found: dict[str, Any] = {}
    for name, read in switches.items():
        try:
            found[name] = read()
        except RuntimeError:
            found[name] = "refused"
    return found


def is_exact() -> bool:
    """In both generations of switches: whoever reads an older one is not refused."""
    now = seen()
    each = [f"{what}{where}" for what in ("matmul", "convolution", "recurrent") for where in ("", " on the CPU")]
    older = now["older matmul"], now["older TF32"], now["older cuDNN"]
    return all(now[name] == "ieee" for name in each) and older == ("highest", False, False)


@pytest.mark.parametrize("how", SETTINGS)
def test_every_switch_is_exact_within_and_as_before_behind(how: str) -> None:
    SETTINGS[how]()
    before = seen()
    with exact_float32():
        assert is_exact()
        with exact_float32():
            assert is_exact()
        assert is_exact()
    assert seen() == before


@pytest.mark.parametrize("how", SETTINGS)
def test_they_come_back_when_the_block_fails(how: str) -> None:
    SETTINGS[how]()
    before = seen()
    with pytest.raises(ZeroDivisionError), exact_float32():
        raise ZeroDivisionError
    assert seen() == before


def test_a_switch_that_follows_a_more_general_one_still_does() -> None:
    everywhere("tf32")
    with exact_float32():
        pass
    assert cuda.matmul.fp32_precision == "tf32"
    everywhere("ieee")
    assert cuda.matmul.fp32_precision == "ieee"


def test_a_second_thread_waits_for_the_first_and_both_leave_what_the_process_had() -> None:
    torch.set_float32_matmul_precision("high")
    before = seen()
    starts, entered = threading.Event(), threading.Event()
    found: list[bool] = []

    def second() -> None:
        starts.set()
        with exact_float32():
            entered.set()
            found.append(is_exact())

    thread = threading.Thread(target=second)
    with exact_float32():
        thread.start()
        assert starts.wait(WAIT)
        assert not entered.wait(0.2)
        assert is_exact()
    thread.join(WAIT)
    assert found == [True]
    assert seen() == before


def test_a_graph_is_recorded_with_the_switches_of_the_process_not_of_another_threads_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.set_float32_matmul_precision("high")
    before, starts, recorded = seen(), threading.Event(), []
    monkeypatch.setattr(torch.cuda, "graph", nullcontext)  # the real one needs a GPU

    def record() -> None:
        starts.set()
        with recording_into(object()):
            recorded.append(seen())

    thread = threading.Thread(target=record)
    with exact_float32():
        thread.start()
        assert starts.wait(WAIT)
        thread.join(0.2)
        assert recorded == []
    thread.join(WAIT)
    assert recorded == [before]


class Replayed:
    def replay(self) -> None:
        """Nothing was captured."""


def test_the_stages_of_a_contract_are_captured_exactly_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_float32_matmul_precision("high")
    before, exact = seen(), []

    def capture(
        body: StageBody, arena: Mapping[str, torch.Tensor], variant: Variant, device: torch.device
    ) -> graphs.Executable:
        exact.append(is_exact())
        return Replayed()

    monkeypatch.setattr(graphs, "capture", capture)
    contract = make_contract()
    bodies: dict[str, StageBody] = {stage.name: lambda arena, variant: None for stage in contract.stages}
    GraphSet(contract, bodies, {}, torch.device("cuda", 0))
    assert len(exact) >= len(contract.stages)
    assert all(exact)
    assert seen() == before


def test_a_single_capture_keeps_the_switches_of_the_process() -> None:
    """A user's model is compared with what it computes itself."""
    torch.set_float32_matmul_precision("high")
    before, within = seen(), []
    graphs.capture(lambda arena, variant: within.append(seen()), {}, Variant("only", {}), torch.device("cpu"))
    assert within == [before]
