"""Captured stages: what a replay reads lives as long as it can be replayed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping

import pytest
import torch

from flashrt_ros.contract import Variant
from flashrt_ros.engine.graphs import CapturedGraph, Executable, RecordedCall, StageBody, capture

VARIANT = Variant("only", {})
Arena = Mapping[str, torch.Tensor]


class Addresses:
    """What a CUDA graph is for memory: it replays, and holds nothing of what it reads."""

    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


def as_captured(body: StageBody, arena: Arena) -> Executable:
    return CapturedGraph(Addresses(), body, arena, VARIANT)


def as_recorded(body: StageBody, arena: Arena) -> Executable:
    return RecordedCall(body, arena, VARIANT)


@pytest.mark.parametrize("make", [as_captured, as_recorded])
def test_a_stage_keeps_what_only_its_body_holds(make: Callable[[StageBody, Arena], Executable]) -> None:
    arena = {"out": torch.zeros(3)}

    def stage() -> tuple[Executable, weakref.ref[torch.Tensor], weakref.ref[torch.Tensor]]:
        weights, window = torch.ones(3), torch.zeros(3)

        def body(arena: Arena, variant: Variant) -> None:
            arena["out"].copy_(weights)

        return make(body, {**arena, "window": window}), weakref.ref(weights), weakref.ref(window)

    captured, weights, window = stage()
    gc.collect()
    captured.replay()
    assert weights() is not None
    assert window() is not None
    del captured
    gc.collect()
    assert weights() is None
    assert window() is None


def test_a_replay_is_the_graphs_own() -> None:
    graph = Addresses()
    captured = CapturedGraph(graph, lambda arena, variant: None, {}, VARIANT)
    captured.replay()
    captured.replay()
    assert graph.replays == 2


def test_a_body_is_recorded_on_a_cpu_and_runs_at_once() -> None:
    arena = {"out": torch.zeros(3)}

    def body(arena: Arena, variant: Variant) -> None:
        arena["out"].add_(1)

    recorded = capture(body, arena, VARIANT, torch.device("cpu"))
    assert arena["out"].tolist() == [1, 1, 1]
    recorded.replay()
    assert arena["out"].tolist() == [2, 2, 2]
