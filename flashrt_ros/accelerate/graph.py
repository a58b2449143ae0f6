"""A whole call as one graph: inputs are copied in, everything is replayed, results are copied out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..engine import recording_into
from .calls import Example
from .constants import record, rerun
from .errors import CaptureError
from .turns import Turns
from .values import Signature, argument_tensors, cloned, copier, opaque, signature, tensors

_WARM_UP_RUNS = 2  # lazy library handles and autotuning happen here, before capture forbids them


class CapturedCall:
    """`call` for one signature, captured on a GPU; on a CPU its operations are run again, without the constant ones.

    Args:
        call: depends on nothing but its arguments, the weights and torch's random numbers.
        example: arguments of the one signature.

    Raises:
        CaptureError: the call cannot be captured.
    """

    def __init__(self, call: Callable[..., Any], example: Example, device: torch.device) -> None:
        self._device = device
        self._call = call  # a graph knows addresses, not tensors: what only the call holds must live as long as it
        self._inputs = cloned(example)
        args, kwargs = self._inputs
        self._windows = argument_tensors(args, kwargs)
        _check(self._inputs, self._windows, device)
        self._turns = Turns(device)

        def run() -> Any:
            with torch.no_grad():
                return call(*args, **kwargs)

        self._recording = record(run, self._windows)
        self._replay = self._captured(run) if device.type == "cuda" else self._again(run)

    def _again(self, run: Callable[[], Any]) -> Callable[[], Any]:
        def replay() -> Any:
            return cloned(rerun(run, self._recording)[0])

        _check_result(replay())
        return replay

    def _captured(self, run: Callable[[], Any]) -> Callable[[], Any]:
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP_RUNS):
                rerun(run, self._recording)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with recording_into(graph):
            result, self._constants = rerun(run, self._recording)
        _check_result(result)
        self._recording.results.clear()  # what the graph does not read can go
        copied = copier(result)
        copied()  # what cannot be put together again must fail here

        def replay() -> Any:
            graph.replay()
            return copied()

        return replay

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result on new values, as tensors of the caller's own. One call at a time; others wait."""
        with self._turns, torch.no_grad():
            for window, value in zip(self._windows, argument_tensors(args, kwargs), strict=True):
                window.copy_(value)
            return self._replay()


class CapturedCalls:
    """One captured call for each signature of the examples."""

    def __init__(self, call: Callable[..., Any], examples: Mapping[Signature, Example], device: torch.device) -> None:
        self._calls = {key: CapturedCall(call, example, device) for key, example in examples.items()}
        self._only = next(iter(self._calls.values())) if len(self._calls) == 1 else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See `CapturedCall`; the guard lets only the examples' signatures through."""
        return (self._only or self._calls[signature(args, kwargs)])(*args, **kwargs)


def _check(example: Example, windows: list[Tensor], device: torch.device) -> None:
    kind = opaque(example)
    if kind:
        raise CaptureError(f"an argument is a {kind}, whose content a graph cannot take in")
    if len(windows) != len(tensors(example)):
        raise CaptureError("an argument holds tensors in something else than lists, tuples and mappings")
    for tensor in windows:
        if tensor.device.type != device.type:
            raise CaptureError(f"an input is on {tensor.device}, the model on {device}; move it there before the call")


def _check_result(result: Any) -> None:
    kind = opaque(result)
    if kind:
        raise CaptureError(f"the result holds a {kind}, which cannot be copied out of a graph")
