"""The complete call through `torch.compile`. Only if it is asked for: it takes minutes for a large model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..patches import Call
from ..structure import Match, Plain, Scene


class CompiledCall(Plain):
    """`torch.compile` in its default mode, without its own fallback to eager."""

    name = "torch_compile"
    kind = "compile"
    capturable = False

    def find(self, scene: Scene) -> Iterable[Match]:
        """The complete call."""

        def build() -> Sequence[Call]:
            compiled: Call = torch.compile(getattr(scene.model, scene.method))
            args, kwargs = scene.examples[0]
            with torch.no_grad():
                compiled(*args, **kwargs)  # what cannot be compiled must not reach the gate
            return (compiled,)

        yield Match((scene.root,), build, (), "the complete call")


STRUCTURES = (CompiledCall(),)
