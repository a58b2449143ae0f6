"""What every kernel has to stand: a captured graph that gives the bits of a plain call, each time it is replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def assert_replays_give_equal_bits(body: Callable[[bool], None], outs: Tensor, replays: int = 100) -> None:
    """`body(overlap)` writes all of `outs`, with equal bits with and without overlap of its launches."""
    body(False)
    first = outs.clone()
    body(True)
    torch.cuda.synchronize()
    assert torch.equal(outs, first)
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body(True)
    for _ in range(replays):
        outs.fill_(float("nan"))
        graph.replay()
        assert torch.equal(outs, first)
