"""The complete call of a model, and the examples on which it is judged."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .errors import AccelerateError
from .values import cloned, tensors

Example = tuple[tuple[Any, ...], dict[str, Any]]
_SEED = 20_262


@dataclass(frozen=True)
class CompleteCall:
    """`model.method(*args, **kwargs)` for each of several examples."""

    model: nn.Module
    method: str
    examples: tuple[Example, ...]

    @property
    def device(self) -> torch.device:
        """Where the model is, judged by its first parameter."""
        first = next(self.model.parameters(), None)
        return torch.device("cpu") if first is None else first.device

    def run(self, index: int) -> Any:
        """The result on example `index`, without gradients; random numbers as they come."""
        args, kwargs = self.examples[index]
        with torch.no_grad():
            if self.method == "forward":
                return self.model(*args, **kwargs)
            return getattr(self.model, self.method)(*args, **kwargs)

    def seeded(self, index: int) -> Any:
        """A copy of the result on example `index`, from a random seed that only `index` decides."""
        with seeded(index, self.device):
            return cloned(self.run(index))

    def results(self) -> list[Any]:
        """`seeded` of every example."""
        return [self.seeded(index) for index in range(len(self.examples))]

    def in_turn(self) -> Callable[[], object]:
        """A function that runs one example after the other, each time it is called."""
        count = 0

        def call() -> object:
            nonlocal count
            count += 1
            return self.run(count % len(self.examples))

        return call


@contextmanager
def seeded(index: int, device: torch.device) -> Iterator[None]:
    """Within the block random numbers start from `index`; afterwards the generators go on as before."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(_SEED + index)
        yield


def complete_call(model: nn.Module, method: str, example_inputs: Sequence[Any]) -> CompleteCall:
    """Check and normalise what the user gave.

    An example is a tuple of positional arguments, a mapping of keyword arguments, a pair of both
    ((args...), {kwargs}), or a single tensor.
    """
    if not isinstance(model, nn.Module):
        raise AccelerateError(f"the model is {type(model).__name__}, expected torch.nn.Module")
    if not callable(getattr(model, method, None)):
        raise AccelerateError(f"{type(model).__name__} has no method '{method}' to accelerate")
    if isinstance(example_inputs, Mapping | torch.Tensor) or not isinstance(example_inputs, Sequence):
        raise AccelerateError("example_inputs must be a list of examples; put the one that you have into a list")
    if not example_inputs:
        raise AccelerateError("example_inputs is empty; parity needs at least one example, better several")
    examples = tuple(_normalised(example) for example in example_inputs)
    _check_devices(model, examples)
    return CompleteCall(model, method, examples)


def _normalised(example: Any) -> Example:
    if isinstance(example, torch.Tensor):
        return (example,), {}
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, tuple):
        if len(example) == 2 and isinstance(example[0], tuple) and isinstance(example[1], Mapping):
            return example[0], dict(example[1])
        return example, {}
    raise AccelerateError(
        f"an example is {type(example).__name__}, expected a tensor, a tuple of arguments, a mapping of keyword "
        "arguments, or a pair of both"
    )


def _check_devices(model: nn.Module, examples: tuple[Example, ...]) -> None:
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise AccelerateError(f"the model is spread over {names}; only a model on one device can be accelerated")
    for example in examples:
        if any(tensor.requires_grad for tensor in tensors(example)):
            raise AccelerateError("an example requires gradients, but training is never accelerated; detach it")


def carries_gradients(call: CompleteCall) -> bool:
    """Whether the original's result carries gradients where they are enabled, found out by running it so once."""
    args, kwargs = call.examples[0]
    function = getattr(call.model, call.method)
    if inspect.isgeneratorfunction(function):
        raise AccelerateError(f"'{call.method}' is a generator; accelerate what computes each of its items")
    try:
        with torch.enable_grad(), seeded(0, call.device):
            return any(tensor.requires_grad for tensor in tensors(function(*args, **kwargs)))
    except torch.OutOfMemoryError:
        return True
