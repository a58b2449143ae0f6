"""What a captured call computes anew, takes for constant, and refuses; on a CPU, operation by operation."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flashrt_ros.accelerate.calls import seeded
from flashrt_ros.accelerate.constants import record
from flashrt_ros.accelerate.errors import CaptureError
from flashrt_ros.accelerate.graph import CapturedCall

CPU = torch.device("cpu")
FIRST, SECOND = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[-5.0, 0.5], [0.25, 7.0]])
WEIGHT = torch.tensor([[2.0, 0.0], [1.0, 3.0]])


def captured(call: Callable[..., Any]) -> CapturedCall:
    return CapturedCall(call, ((FIRST,), {}), CPU)


def folded(call: CapturedCall) -> set[str]:
    """Names of the operations that are left out."""
    recording = call._recording
    return {recording.names[index].removeprefix("aten::").split(".")[0] for index in recording.results}


def mask_of_shapes(x: Tensor) -> Tensor:
    mask = torch.ones(x.shape[0], x.shape[0]).tril().log()
    return (x @ x.T + mask).softmax(-1)


def constant_from_python(x: Tensor) -> Tensor:
    return x * torch.tensor([1.0, 2.0]) + torch.as_tensor(3.0)


def loop_over_times(x: Tensor) -> Tensor:
    for step in range(3):
        time = torch.tensor(1 - step / 3).expand(2)
        x = x + (time * WEIGHT).sin()
    return x


def product_of_weights(x: Tensor) -> Tensor:
    return x @ (WEIGHT @ WEIGHT).T


def buffer_that_is_filled(x: Tensor) -> Tensor:
    buffer = torch.zeros(3, 2)
    buffer[1:] = x
    view = buffer[0]
    view += x[1]
    return buffer


def constant_that_is_written_before_it_is_read(x: Tensor) -> Tensor:
    positions = torch.zeros(2, dtype=torch.int64)
    positions[torch.tensor([False, True])] = torch.tensor([1])
    return x[positions]


def item_of_a_constant(x: Tensor) -> Tensor:
    return x * WEIGHT.sum().item() if WEIGHT.min() < 1 else x


def random_inside(x: Tensor) -> Tensor:
    return x + torch.randn(2) * torch.rand_like(x)


def uninitialised(x: Tensor) -> Tensor:
    out = torch.empty(2, 2)
    out.copy_(x)
    return out + 1


def inplace_chain(x: Tensor) -> Tensor:
    y = x.clone()
    y.mul_(2).add_(WEIGHT)
    return y.t().contiguous()


def several_results(x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return x + 1, {"constant": torch.arange(3), "half": x / 2}


AGREEING = (
    mask_of_shapes,
    constant_from_python,
    loop_over_times,
    product_of_weights,
    buffer_that_is_filled,
    constant_that_is_written_before_it_is_read,
    item_of_a_constant,
    random_inside,
    uninitialised,
    inplace_chain,
    several_results,
)


@pytest.mark.parametrize("call", AGREEING, ids=lambda call: call.__name__)
def test_a_captured_call_gives_the_calls_bits_on_any_input(call: Callable[[Tensor], Any]) -> None:
    replayed = captured(call)
    for index, x in enumerate((FIRST, SECOND, FIRST * 3)):
        with seeded(index, CPU):
            expected = call(x)
        with seeded(index, CPU):
            result = replayed(x)
        torch.testing.assert_close(result, expected, rtol=0, atol=0)


def test_what_does_not_depend_on_the_inputs_is_left_out() -> None:
    assert {"ones", "tril", "log"} <= folded(captured(mask_of_shapes))
    assert {"tensor", "sin", "mul"} <= folded(captured(loop_over_times))
    assert "mm" in folded(captured(product_of_weights))
    assert {"_local_scalar_dense", "sum"} <= folded(captured(item_of_a_constant))


def test_what_depends_on_them_or_on_chance_is_not() -> None:
    assert not folded(captured(random_inside))
    assert "zeros" not in folded(captured(buffer_that_is_filled))
    assert "empty" not in folded(captured(uninitialised))
    assert not {"softmax", "_softmax", "mm"} & folded(captured(mask_of_shapes))


def test_results_are_the_callers_own() -> None:
    replayed = captured(several_results)
    first = replayed(FIRST)
    kept = first[0].clone()
    replayed(SECOND)
    assert torch.equal(first[0], kept)
    first[1]["constant"].zero_()
    assert torch.equal(replayed(FIRST)[1]["constant"], torch.arange(3))


def test_inputs_are_only_read() -> None:
    x = FIRST.clone()
    captured(lambda x: x.add_(1))(x)
    assert torch.equal(x, FIRST)


class Remembering(nn.Module):
    def __init__(self, how: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("total", torch.zeros(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.get_buffer("total"), x)


def accumulated(total: Tensor, x: Tensor) -> Tensor:
    before = total * 2
    total.add_(x)
    return before + x


def counted(total: Tensor, x: Tensor) -> Tensor:
    total.add_(1)
    return x + total


def constant_changed_after_reading(x: Tensor) -> Tensor:
    table = torch.zeros(2, 2)
    y = x + table
    table.fill_(1)
    return y + table


def host_value(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x


REFUSED: dict[Callable[..., Any], str] = {
    host_value: "brings a value that depends on the inputs",
    lambda x: x[x > 0]: "brings a value|nonzero",
    lambda x: x * torch.rand(1).item(): "or on chance",
    Remembering(accumulated): "changes memory that outlives the call",
    Remembering(counted): "changes memory that outlives the call",
    constant_changed_after_reading: "changes a constant after it was read",
    lambda x: (x, object()): "the result holds a object",
}


@pytest.mark.parametrize("call", REFUSED, ids=lambda call: getattr(call, "__name__", type(call).__name__))
def test_a_call_that_cannot_be_replayed_is_refused(call: Callable[..., Any]) -> None:
    with pytest.raises(CaptureError, match=REFUSED[call]):
        captured(call)


# "meta" stands for a GPU: where tensors are is all that matters here.
META = torch.ones(2, 2, device="meta")


@torch.library.custom_op("flashrt_ros_test::attention", mutates_args=())
def attention(x: Tensor) -> tuple[Tensor, Tensor]:
    """As memory-efficient attention on a GPU: what it computes, and a random seed on the host for its gradient."""
    return x + 1, torch.empty((), dtype=torch.int64)


@torch.library.custom_op("flashrt_ros_test::copied", mutates_args=())
def copied(x: Tensor) -> Tensor:
    """A copy on the host."""
    return torch.empty(x.shape)


attention.register_fake(lambda x: (x + 1, torch.empty((), dtype=torch.int64)))
copied.register_fake(lambda x: torch.empty(x.shape))


def test_the_random_seed_that_attention_returns_is_no_copy_to_the_host() -> None:
    recording = record(lambda: attention(META)[0] * 2, [META])
    assert recording.names
    assert not recording.results
    for call in (lambda: copied(META), lambda: copied(META.sum()), lambda: META * torch.rand(())):
        with pytest.raises(CaptureError, match="to or from the host"):
            record(call, [META])


def test_a_call_that_changes_its_path_is_refused() -> None:
    paths = iter((1, 2, 3))

    def changing(x: Tensor) -> Tensor:
        for _ in range(next(paths)):
            x = x + 1
        return x

    with pytest.raises(CaptureError, match="the call changes its path"):
        captured(changing)


def test_opaque_arguments_are_refused() -> None:
    with pytest.raises(CaptureError, match="an argument is a object"):
        CapturedCall(lambda x, y: x, ((FIRST, object()), {}), CPU)


def test_arguments_that_the_guard_cannot_look_into_are_refused() -> None:
    class Holder:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    pytree.register_pytree_node(Holder, lambda holder: ([holder.x], None), lambda leaves, _: Holder(*leaves))
    with pytest.raises(CaptureError, match="something else than lists, tuples and mappings"):
        CapturedCall(lambda holder: holder.x + 1, ((Holder(FIRST),), {}), CPU)


def test_a_call_that_fails_does_not_keep_others_waiting() -> None:
    replayed = captured(lambda x: x * 2)
    with pytest.raises(RuntimeError):
        replayed(torch.ones(3, 5))
    assert torch.equal(replayed(FIRST), FIRST * 2)


def test_threads_do_not_see_each_others_inputs() -> None:
    replayed = captured(buffer_that_is_filled)
    inputs = [torch.full((2, 2), float(index)) for index in range(8)]
    wrong: list[int] = []

    def work(index: int) -> None:
        expected = buffer_that_is_filled(inputs[index])
        wrong.extend(index for _ in range(20) if not torch.equal(replayed(inputs[index]), expected))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
