"""What ours is measured against, in the same process and on the same observation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...engine import recording_into
from ...policies.pi05.checkpoint import WEIGHTS_FILE
from ...policies.pi05.config import Pi05Config
from ...policies.pi05.seeded import seeded_source
from ...policies.pi05.source import FileSource, TensorSource
from ...policies.pi05.weights import Pi05Weights, load_weights
from ..errors import MeasureError
from .observations import Observation
from .official import Official
from .plain import Plain

LEROBOT_EAGER, LEROBOT_COMPILED = "lerobot_eager", "lerobot_compiled"
PLAIN_GRAPH, PLAIN_COMPILED = "plain_graph", "plain_compiled_layer_graph"
BASELINES = (LEROBOT_EAGER, LEROBOT_COMPILED, PLAIN_GRAPH, PLAIN_COMPILED)
_WARM_UP_RUNS = 3  # before capture: library handles, compilation


@dataclass(frozen=True)
class Baseline:
    """A decision by somebody else: `run()` enqueues it, `actions()` is float32[chunk, width] of the last one.

    `memory` is what a captured graph reads and does not own: weights and inputs must live as long as it does.
    """

    name: str
    run: Callable[[], object]
    actions: Callable[[], np.ndarray]
    memory: object = None


@dataclass(frozen=True)
class Shared:
    """The model and the input that all baselines share."""

    config: Pi05Config
    folder: Path | None
    device: torch.device
    observation: Observation

    def weights(self) -> Pi05Weights:
        """Packed weights for the plain model, in the configured dtype."""
        return load_weights(self._source(), self.config, self.device)

    def _source(self) -> TensorSource:
        if self.folder is None:
            return seeded_source(self.config)
        return FileSource(self.folder / WEIGHTS_FILE, self.config)


@contextmanager
def baselines(names: tuple[str, ...], shared: Shared) -> Iterator[list[Baseline]]:
    """Build the baselines called `names`; what two of them can share is loaded once."""
    with torch.inference_mode():
        made = list(_lerobot(names, shared)) + list(_plain(names, shared))
    yield sorted(made, key=lambda baseline: names.index(baseline.name))


def _lerobot(names: tuple[str, ...], shared: Shared) -> Iterator[Baseline]:
    wanted = [name for name in (LEROBOT_EAGER, LEROBOT_COMPILED) if name in names]
    if not wanted:
        return
    if shared.folder is None:
        raise MeasureError(f"baseline '{wanted[0]}' needs a checkpoint that LeRobot can load; give --checkpoint")
    # Its precision for speed: bfloat16, in which LeRobot keeps vision and norms in float32.
    official = Official(shared.folder, shared.config, "bfloat16", shared.device)
    keywords = {**official.inputs(shared.observation).keywords(), "num_steps": shared.config.steps}
    for name in wanted:
        sample = official.compiled() if name == LEROBOT_COMPILED else official.policy.model.sample_actions
        yield _held(name, partial(sample, **keywords))


def _plain(names: tuple[str, ...], shared: Shared) -> Iterator[Baseline]:
    wanted = [name for name in (PLAIN_GRAPH, PLAIN_COMPILED) if name in names]
    if not wanted:
        return
    weights = shared.weights()
    for name in wanted:
        plain = Plain(shared.config, weights, compiled=name == PLAIN_COMPILED)
        inputs = plain.inputs(shared.observation, shared.device)
        yield _graphed(name, partial(plain, inputs), shared.device)


def _held(name: str, call: Callable[[], Tensor]) -> Baseline:
    """A baseline that is called anew each time."""
    last: list[Tensor] = []

    def run() -> None:
        last[:] = [call()]

    return Baseline(name, run, lambda: _host(last[0]))


def _graphed(name: str, call: Callable[[], Tensor], device: torch.device) -> Baseline:
    """A baseline as one CUDA graph; a plain call on a CPU."""
    if device.type != "cuda":
        return _held(name, torch.inference_mode()(call))
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP_RUNS):
            call()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with recording_into(graph):
        result = call()
    return Baseline(name, graph.replay, lambda: _host(result), memory=call)


def _host(actions: Tensor) -> np.ndarray:
    array: np.ndarray = actions.float().cpu().numpy()
    return array[0] if array.ndim == 3 else array
