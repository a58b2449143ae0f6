"""Guards: what a replaced site accepts, and what happens with every other call."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import nn

from .errors import AccelerateError, Outside
from .patches import Call, InForce
from .values import Signature, checker, needs_grad, signature
from .weights import WeightWatch

log = logging.getLogger("flashrt_ros.accelerate")


@dataclass
class Tally:
    """Calls of one site that a guard sent to the original, by reason, and whether the site has given up."""

    site: str
    misses: Counter[str] = field(default_factory=Counter)
    detached: str = ""


class Guard:
    """Decides whether a call is one that was measured.

    A call is outside if it asks for gradients, if shape, dtype, device, strides or a plain argument differ from every
    example's, if the module changed between training and evaluation, if autocasting was switched, or if the weights
    changed. On a GPU the counters of the weights, which may be hundreds, are read while it already works on the call:
    `reason` first, then the call, then `afterwards`, whose reason makes the result void.

    Args:
        module: whose call is guarded.
        accepted: signatures of the examples' calls.
        watch: the weights that what runs instead was made from.
        graded: the original's result carries gradients where they are enabled (False for methods that disable them).
    """

    def __init__(self, module: nn.Module, accepted: frozenset[Signature], watch: WeightWatch, graded: bool) -> None:
        self._module, self._watch = module, watch
        self._accepted = {known: checker(known) for known in accepted}
        self._as_before = next(iter(self._accepted.values()))  # most calls are like the one before
        self._training = module.training
        self._graded = graded
        self._parameters = tuple(module.parameters())
        self._device = _device_type(module)
        self._autocast = torch.is_autocast_enabled(self._device)

    def reason(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
        """Why the call must run the original; None if it need not."""
        if self._graded and torch.is_grad_enabled() and (needs_grad(args, kwargs) or self._trainable()):
            return "gradients are asked for"
        if self._module.training is not self._training:
            return "training mode was switched"
        if torch.is_autocast_enabled(self._device) is not self._autocast:
            return "autocasting was switched"
        if not self._as_before(args, kwargs) and not self._known(args, kwargs):
            return "shape, dtype, device, strides or a plain argument differ from the examples'"
        return self._watch.told() if self._device == "cuda" else self._watch.reason()

    def afterwards(self) -> str | None:
        """Why the call that was just made must be made again by the original; None if it need not."""
        return self._watch.reason() if self._device == "cuda" else None

    def _known(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether the call is like another one of the examples'; they may be many, so they are looked up."""
        found = self._accepted.get(signature(args, kwargs))
        if found is None:
            return False
        self._as_before = found
        return True

    def _trainable(self) -> bool:
        return any(parameter.requires_grad for parameter in self._parameters)


def _device_type(module: nn.Module) -> str:
    first = next(module.parameters(), None)
    return "cpu" if first is None else first.device.type


class Stopwatch(Guard):
    """A guard that sums up the seconds of its decisions, without those in which a GPU was still at work on the call."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self.seconds = 0.0

    def reason(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
        """The guard's own answer."""
        start = perf_counter()
        reason = self._guard.reason(args, kwargs)
        self.seconds += perf_counter() - start
        return reason

    def afterwards(self) -> str | None:
        """The guard's own answer."""
        start = perf_counter()
        reason = self._guard.afterwards()
        end = perf_counter()
        if not torch.cuda.is_available() or torch.cuda.current_stream().query():
            self.seconds += end - start
        return reason


class Guarded(InForce):
    """One site in its accelerated form: `call` within the guard, the original outside, counted.

    After `patience` calls outside in a row the site detaches itself, with a warning that says why: from then on it only
    passes calls on. Any thread may call it, and `call` may call the site again.
    """

    def __init__(self, site: str, guard: Guard, call: Call, patience: int) -> None:
        self.tally = Tally(site)
        self.guard = guard
        self.original: Call = _unpatched
        self._call, self._patience = call, patience
        self._row = 0
        self._lock = threading.Lock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The call, one way or the other."""
        if self.tally.detached:
            return self.original(*args, **kwargs)
        reason = self.guard.reason(args, kwargs)
        if reason is None:
            try:
                result = self._call(*args, **kwargs)
            except Outside as outside:
                reason = str(outside)
            else:
                reason = self.guard.afterwards()
                if reason is None:
                    self._row = 0
                    return result
        self._missed(reason)
        return self.original(*args, **kwargs)

    def _missed(self, reason: str) -> None:
        with self._lock:
            self.tally.misses[reason] += 1
            self._row += 1
            if self._row < self._patience or self.tally.detached:
                return
            self.tally.detached = f"{self._row} calls outside the guard in a row, the last: {reason}"
        log.warning("%s runs the original from now on: %s", self.tally.site, self.tally.detached)


def _unpatched(*_: Any, **__: Any) -> Any:
    raise AccelerateError("a guarded call ran before it was put into a model")
