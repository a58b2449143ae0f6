"""Putting another method onto one module instance, and taking it off again without a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from .errors import AccelerateError

Call = Callable[..., Any]
Maker = Callable[[Call], Call]
"""Makes the new method from the one that it replaces."""

_ABSENT = object()


class InForce:
    """What a patch puts onto a module; it belongs to that one module."""

    def __reduce__(self) -> str:
        raise AccelerateError("an accelerated model cannot be copied or pickled; detach it first (report.detach())")


class Patch:
    """`module.method` becomes `make(original)` while applied. Parameters, buffers and hooks are not touched.

    Patches of one method stack: they are removed in the reverse of the order in which they were applied.
    """

    def __init__(self, module: nn.Module, method: str, make: Maker) -> None:
        self._module, self._method, self._make = module, method, make
        self._before: Any = _ABSENT
        self._applied = False

    def apply(self) -> None:
        """Put the method on; nothing if it is on."""
        if not self._applied:
            self._before = self._module.__dict__.get(self._method, _ABSENT)
            self._module.__dict__[self._method] = self._make(getattr(self._module, self._method))
            self._applied = True

    def remove(self) -> None:
        """Put back what was there; nothing if it is off."""
        if not self._applied:
            return
        if self._before is _ABSENT:
            del self._module.__dict__[self._method]
        else:
            self._module.__dict__[self._method] = self._before
        self._applied = False
