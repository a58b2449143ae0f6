"""The complete call as one CUDA graph, without what does not depend on its inputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..errors import CaptureError
from ..graph import CapturedCalls
from ..patches import Call
from ..structure import Match, Plain, Scene
from ..values import signature


class CallGraph(Plain):
    """One graph for each signature of the examples, of the model as it is with the other candidates of a set in it.

    What runs in Python between the operations runs once, when the graph is captured. A call that changes attributes of
    the model, or whose modules have hooks, is therefore refused.
    """

    name = "cuda_graph"
    kind = "graph"
    per_set = True

    def available(self, device: torch.device) -> str:
        """GPUs."""
        return "" if device.type == "cuda" else "needs a GPU"

    def find(self, scene: Scene) -> Iterable[Match]:
        """The complete call."""

        def build() -> Sequence[Call]:
            if scene.side_effects:
                raise CaptureError(f"the call changes {scene.side_effects}, which a replay would not")
            if scene.hooked:
                raise CaptureError(f"'{min(scene.hooked)}' has forward hooks, which a replay would not run")
            call = getattr(scene.model, scene.method)
            examples = {signature(args, kwargs): (args, kwargs) for args, kwargs in scene.examples}
            return (CapturedCalls(call, examples, scene.device),)

        yield Match((scene.root,), build, (scene.model,), "the complete call")


STRUCTURES = (CallGraph(),)
