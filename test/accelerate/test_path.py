"""A recorded call takes the path that it takes without a graph, and the one for captures only where it must."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flashrt_ros.accelerate.constants import record
from flashrt_ros.accelerate.errors import CaptureError
from flashrt_ros.accelerate.graph import CapturedCall
from flashrt_ros.accelerate.path import told
from test.accelerate.models import qwen3, with_padding

CPU = torch.device("cpu")
X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


def capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


def with_a_mask_only_for_graphs(x: Tensor) -> Tensor:
    """As transformers' attention: equal in exact numbers, other kernels."""
    return x + torch.ones(2, 2).tril().log() if capturing() else x * 2


def without_looking_only_for_graphs(x: Tensor) -> Tensor:
    """As transformers' padding: a value on the host decides, unless there is a graph."""
    positive = x.sum() > 0
    return torch.where(positive, x * 2, x) if capturing() or bool(positive) else x


def waiting_unless_for_graphs(x: Tensor) -> Tensor:
    if not capturing():
        torch.cuda.synchronize()
    return x * 2


@pytest.mark.parametrize(
    ("call", "kept_for_graphs"),
    [(with_a_mask_only_for_graphs, False), (without_looking_only_for_graphs, True), (waiting_unless_for_graphs, True)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_path_without_a_graph_is_taken_where_it_can_be(call: Callable[..., Tensor], kept_for_graphs: bool) -> None:
    captured = CapturedCall(call, ((X,), {}), CPU)
    assert captured._recording.capturing is kept_for_graphs
    for x in (X, -X, X * 3):
        unchanged = call is without_looking_only_for_graphs and x.sum() <= 0
        assert torch.equal(captured(x), x if unchanged else x * 2)


def test_where_no_path_can_be_recorded_the_reason_is_that_of_the_first() -> None:
    def call(x: Tensor) -> Tensor:
        return x[x > 0] if capturing() else x * x.sum().item()

    with pytest.raises(CaptureError, match="_local_scalar_dense"):
        CapturedCall(call, ((X,), {}), CPU)


def test_a_call_that_waits_for_the_gpu_is_refused() -> None:
    def call(x: Tensor) -> Tensor:
        torch.cuda.synchronize()
        return x

    with pytest.raises(CaptureError, match="waits for the GPU"):
        CapturedCall(call, ((X,), {}), CPU)


def test_only_the_thread_that_records_is_told() -> None:
    def answer() -> bool | str:
        try:
            return capturing()
        except RuntimeError:  # a torch for GPUs on a machine that has none
            return "no GPU"

    others: list[bool | str] = []
    real, expected = torch.cuda.is_current_stream_capturing, answer()
    with told(True):
        thread = threading.Thread(target=lambda: others.append(answer()))
        thread.start()
        thread.join()
        assert answer() is True
    assert others == [expected] != [True]
    assert torch.cuda.is_current_stream_capturing is real


def test_threads_that_record_at_once_leave_torch_as_it_was() -> None:
    before = (torch.cuda.is_current_stream_capturing, torch.cuda.synchronize)
    start = threading.Barrier(4)
    wrong: list[int] = []

    def work(index: int) -> None:
        mine = index % 2 == 1
        start.wait()
        for _ in range(20):
            with told(mine):
                wrong.extend([index] * (capturing() is not mine))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert (torch.cuda.is_current_stream_capturing, torch.cuda.synchronize) == before


def attention_inputs(call: Callable[[], Any]) -> list[tuple[bool, bool]]:
    """Of each attention in `call`: whether it gets a mask, and whether it is told to be causal."""
    seen: list[tuple[bool, bool]] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def noting(*args: Any, **kwargs: Any) -> Tensor:
        seen.append((kwargs["attn_mask"] is not None, kwargs["is_causal"]))
        return attend(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patches, torch.no_grad():
        patches.setattr(torch.nn.functional, "scaled_dot_product_attention", noting)
        call()
    return seen


def test_transformers_leave_the_causal_mask_to_the_kernel_in_a_graph_too() -> None:
    pytest.importorskip("transformers", reason="transformers are not installed here")
    model, examples = qwen3(CPU, torch.float32)
    without = attention_inputs(lambda: model(**examples[0]))
    assert without == [(False, True)] * len(without) != []
    assert attention_inputs(lambda: record(lambda: model(**examples[0]), [examples[0]["input_ids"]])) == without
    with told(True):
        assert attention_inputs(lambda: model(**examples[0])) == [(True, False)] * len(without)


def test_transformers_padding_which_is_data_takes_the_path_for_graphs() -> None:
    pytest.importorskip("transformers", reason="transformers are not installed here")
    model, examples = qwen3(CPU, torch.float32)
    padded = with_padding(examples)
    captured = CapturedCall(model, ((), padded[0]), CPU)
    assert captured._recording.capturing
    for example in padded:
        with torch.no_grad():
            expected = model(**example)
        torch.testing.assert_close(captured(**example).logits, expected.logits, rtol=1e-5, atol=1e-5)
