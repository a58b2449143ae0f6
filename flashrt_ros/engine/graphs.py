"""Graphs: stages captured once for each shape key, then only replayed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch

from ..contract import Contract, Stage, Variant
from .errors import EngineError, UncapturedShapeError
from .float32 import exact_float32, process_wide

StageBody = Callable[[Mapping[str, torch.Tensor], Variant], None]
"""Reads and writes the arena's tensors in place for one shape key. On a GPU it must be capturable: no `.item()`, no
shape that depends on data, no tensor that outlives the call."""

_WARM_UP_RUNS = 2  # lazy library handles and autotuning happen here, before capture forbids them


@contextmanager
def recording_into(graph: Any) -> Iterator[None]:
    """Capture what the current thread enqueues into `graph`, a torch.cuda.CUDAGraph, one capture at a time.

    Float32 products are what the process's switches say, and not what another thread's `exact_float32` does. Garbage is
    not collected meanwhile: a graph that dies in between waits for the device, and CUDA ends a capture for that.
    """
    with process_wide:
        collects = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(graph):
                yield
        finally:
            if collects:
                gc.enable()


class Executable(Protocol):
    """A captured stage. It keeps its body, and with it all memory that a replay reads, for as long as it lives."""

    def replay(self) -> None:
        """Run it again on the same addresses."""


class RecordedCall:
    """The CPU's stand-in for a CUDA graph: a body bound to its arguments."""

    def __init__(self, body: StageBody, arena: Mapping[str, torch.Tensor], variant: Variant) -> None:
        self._call = (body, arena, variant)

    def replay(self) -> None:
        """Run the body."""
        body, arena, variant = self._call
        with torch.inference_mode():
            body(arena, variant)


class CapturedGraph:
    """A CUDA graph of a body, and the body itself.

    A graph knows addresses, not tensors: weights that only the body holds would be given back, and read all the same.
    """

    def __init__(self, graph: Executable, body: StageBody, arena: Mapping[str, torch.Tensor], variant: Variant) -> None:
        self._read = (body, arena, variant)
        self.replay = graph.replay  # the graph's own, as this is the hot path


def capture(
    body: StageBody,
    arena: Mapping[str, torch.Tensor],
    variant: Variant,
    device: torch.device,
) -> Executable:
    """Capture `body` for `variant`; the returned executable replays it on the arena's fixed addresses.

    Float32 products are what the process's switches say: those of the moment on a GPU, those of each replay on a CPU.
    """
    if device.type == "cpu":
        recorded = RecordedCall(body, arena, variant)
        recorded.replay()  # a body that cannot run must fail at configure, not in the first decision
        return recorded
    return _capture_cuda(body, arena, variant)


def _capture_cuda(body: StageBody, arena: Mapping[str, torch.Tensor], variant: Variant) -> Executable:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode():
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP_RUNS):
                body(arena, variant)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        with recording_into(graph):
            body(arena, variant)
    return CapturedGraph(graph, body, arena, variant)


class GraphSet:
    """Every stage of a contract, captured for every shape key.

    On a GPU stages compute float32 products exactly, so that no switch for float32 decides about the bits behind a
    fingerprint.
    """

    def __init__(
        self,
        contract: Contract,
        bodies: Mapping[str, StageBody],
        arena: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> None:
        _check_bodies(contract, bodies)
        self._graphs: dict[tuple[str, str], Executable] = {}
        with nullcontext() if device.type == "cpu" else exact_float32():
            for stage in contract.order:
                self._capture_stage(contract, stage, bodies[stage.name], arena, device)

    def _capture_stage(
        self,
        contract: Contract,
        stage: Stage,
        body: StageBody,
        arena: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> None:
        shared: Executable | None = None
        for variant in contract.variants:
            if stage.variants or shared is None:
                shared = capture(body, arena, variant, device)
            self._graphs[stage.name, variant.name] = shared

    def __len__(self) -> int:
        return len({id(graph) for graph in self._graphs.values()})

    def replay(self, stage: str, variant: str) -> None:
        """Run the graph of `stage` for `variant`; UncapturedShapeError if there is none."""
        graph = self._graphs.get((stage, variant))
        if graph is None:
            raise UncapturedShapeError(f"stage '{stage}' was not captured for shape '{variant}'")
        graph.replay()


def _check_bodies(contract: Contract, bodies: Mapping[str, StageBody]) -> None:
    declared = {stage.name for stage in contract.stages}
    missing, surplus = sorted(declared - set(bodies)), sorted(set(bodies) - declared)
    if missing:
        raise EngineError(f"contract '{contract.name}' declares stage '{missing[0]}', but no body was given for it")
    if surplus:
        raise EngineError(f"a body was given for '{surplus[0]}', which contract '{contract.name}' does not declare")
