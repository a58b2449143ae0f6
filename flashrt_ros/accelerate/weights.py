"""Noticing that weights changed after something was prepared from them."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from .patches import Call, InForce, Maker, Patch

_EVENTS = {"_apply": "moved or converted", "_load_from_state_dict": "loaded anew"}
_version = attrgetter("_version")


class WeightWatch:
    """Whether the parameters and buffers of some modules are what they were.

    Three ways of changing them are noticed: in place (torch's version counter), by `module.to()` and its kind, and by
    `load_state_dict`. Writing through `.data` leaves no trace in torch and is not noticed. Tensors made under
    `torch.inference_mode` have no counter, so that only the other two are noticed.

    Args:
        tensors: with the module that each belongs to, what must not change.
    """

    def __init__(self, tensors: Iterable[tuple[nn.Module, Tensor]]) -> None:
        pairs = list(tensors)
        self.changed = ""
        self._tensors = [tensor for _, tensor in pairs if not tensor.is_inference()]
        self._versions = self._now()
        self.patches = [
            Patch(module, method, self._noticing(why))
            for module in {id(module): module for module, _ in pairs}.values()
            for method, why in _EVENTS.items()
        ]

    def told(self) -> str | None:
        """What was noticed so far, without looking: memory that was given back, which nothing may read, among it."""
        return self.changed or None

    def reason(self) -> str | None:
        """Why what was prepared is out of date; None while it is not."""
        if not self.changed and self._now() != self._versions:
            self.changed = "weights were changed in place"
        return self.changed or None

    def _now(self) -> list[int]:
        return list(map(_version, self._tensors))

    def _noticing(self, why: str) -> Maker:
        return lambda original: _Noticing(self, why, original)


class _Noticing(InForce):
    """A method of a module that also tells a watch."""

    def __init__(self, watch: WeightWatch, why: str, original: Call) -> None:
        self._watch, self._why, self._original = watch, why, original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._watch.changed = f"weights were {self._why}"
        return self._original(*args, **kwargs)


def weights_of(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, Tensor]]:
    """Every parameter and buffer of `modules` and below, each with its owner, each tensor once."""
    found: dict[int, tuple[nn.Module, Tensor]] = {}
    for module in modules:
        for owner in module.modules():
            for tensor in (*owner.parameters(recurse=False), *owner.buffers(recurse=False)):
                found.setdefault(id(tensor), (owner, tensor))
    return list(found.values())
