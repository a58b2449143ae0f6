"""What of a call does not depend on its inputs, so that a graph need not compute it again.

A call is run once while every operation is watched. A tensor *depends* on the inputs if it was made from one, directly
or through others, from random numbers, or from memory that nobody filled. Everything else (masks made of shapes, rotary
tables, embeddings of a loop's own time steps, products of weights) is a constant of the call: its operations are left
out of the second run, which a graph records, and the results of the first are used. This also removes the copies from
and to the host that cannot be recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from .errors import CaptureError
from .path import refusing_to_wait, told
from .values import mapped, tensors

_FROM_HOST_DATA = (torch.tensor, torch.as_tensor)  # they copy below the level at which operations are seen
_UNSTEADY = "aten::detach"  # torch adds it to a factory's result where somebody else holds that, and not elsewhere
_TO_HOST = (  # the host reads a value, or needs one to know how large the result is
    "_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "repeat_interleave", "bincount",
    "_unique2",
)  # fmt: skip
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")


Memory = tuple[str, int]
"""Device type and address of a storage; an address may be used again after its storage is gone."""


class Recording:
    """The operations of one call in order, and which of them are constant.

    `results[i]` is what the i-th operation gave, where it is constant; otherwise it is absent. `capturing` is what the
    call was told when it asked whether a graph is being captured.
    """

    def __init__(self, capturing: bool = False) -> None:
        self.capturing = capturing
        self.names: list[str] = []
        self.results: dict[int, Any] = {}
        self._dependent: dict[Memory, bool] = {}
        self._makers: dict[Memory, list[int]] = {}  # of memory made by the call: what made, viewed or wrote it
        self._alive: list[Tensor] = []
        self._read: set[Memory] = set()  # memory that an operation on dependent values has read
        self._folded: set[Memory] = set()  # memory that existed before the call and that a constant was made of

    # -- first run -----------------------------------------------------------------------------------------------------

    def depends(self, inputs: Sequence[Tensor]) -> None:
        """Mark the call's inputs."""
        for tensor in inputs:
            self._dependent[_storage(tensor)] = True

    def add_host_data(self, name: str, result: Any) -> None:
        """An operation that made a tensor of Python values."""
        index = self._next(name)
        self.results[index] = result
        for tensor in tensors(result):
            self._own(tensor, index, dependent=False)

    def add(self, function: Any, arguments: Any, result: Any) -> None:
        """An operation with its arguments and result."""
        name, inputs, outputs = function.name(), tensors(arguments), tensors(result)
        index = self._next(name)
        dependent = _undetermined(function) or any(self._dependent.get(_storage(tensor), False) for tensor in inputs)
        if dependent:
            # A constant without dimensions, wherever it is, becomes an argument of the kernel.
            moved = [tensor for tensor in inputs if tensor.ndim or self._dependent.get(_storage(tensor), False)]
            _refuse_host(name, inputs, moved + _results(outputs))
        else:
            self.results[index] = result
        held = {_storage(tensor) for tensor in inputs}
        written = {_storage(tensor) for tensor in _written(function, *arguments)}
        for key in written:
            self._write(key, index, dependent)
        for tensor in outputs:
            if _storage(tensor) not in held:
                self._own(tensor, index, dependent)
            elif _storage(tensor) in self._makers:
                self._makers[_storage(tensor)].append(index)
        (self._read if dependent else self._folded).update(held - written)

    def _next(self, name: str) -> int:
        self.names.append(name)
        return len(self.names) - 1

    def _own(self, tensor: Tensor, index: int, dependent: bool) -> None:
        """Memory that is new, whatever was at its address before."""
        key = _storage(tensor)
        if dependent and tensor.device.type == "cpu":
            self._alive.append(tensor)  # numpy's memory appears without an operation, so no address may be used twice
        self._dependent[key], self._makers[key] = dependent, [index]
        self._read.discard(key)
        self._folded.discard(key)

    def _write(self, key: Memory, index: int, dependent: bool) -> None:
        """A write into memory, which may have been a constant until now."""
        name = self.names[index]
        if key not in self._makers:
            if not dependent or key in self._folded:
                raise CaptureError(f"{name} changes memory that outlives the call, and that the call itself reads")
            return
        self._makers[key].append(index)
        if dependent and not self._dependent[key]:
            # A buffer that starts as a constant and is then filled: every call must make it anew.
            self._dependent[key] = True
            for maker in self._makers[key]:
                self.results.pop(maker, None)
        elif not dependent and key in self._read:
            raise CaptureError(f"{name} changes a constant after it was read")

    # -- second run ----------------------------------------------------------------------------------------------------

    def check(self, index: int, name: str) -> None:
        """CaptureError unless the second run does the same as the first."""
        expected = self.names[index] if index < len(self.names) else "nothing"
        if name != expected:
            raise CaptureError(f"operation {index} is {name}, but was {expected} before: the call changes its path")


class _HostData(TorchFunctionMode):
    """Sees tensors that are made of Python values."""

    def __init__(self, step: Callable[[str, Callable[[], Any]], Any]) -> None:
        super().__init__()
        self._step = step

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in _FROM_HOST_DATA and not tensors((args, kwargs)):

            def make() -> Any:
                with _disable_current_modes():
                    return function(*args, **(kwargs or {}))

            return self._step(function.__name__, make)
        return function(*args, **(kwargs or {}))


class _First(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    def host_data(self, name: str, make: Callable[[], Any]) -> Any:
        result = make()
        self._recording.add_host_data(name, result)
        return result

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.name() != _UNSTEADY:
            self._recording.add(function, (args, kwargs), result)
        return result


class _Second(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording, self._index = recording, 0
        self.used: list[Tensor] = []

    def host_data(self, name: str, make: Callable[[], Any]) -> Any:
        known, result = self._step(name)
        return result if known else make()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.name() == _UNSTEADY:
            return function(*args, **(kwargs or {}))
        known, result = self._step(function.name())
        if known:
            # Autograd above writes into the tensors that it gets, so it gets new ones on the same memory.
            return mapped(torch.ops.aten.alias, result) if not function._schema.is_mutable else result
        self.used += tensors((args, kwargs))
        return function(*args, **(kwargs or {}))

    def _step(self, name: str) -> tuple[bool, Any]:
        index = self._index
        self._index += 1
        self._recording.check(index, name)
        return index in self._recording.results, self._recording.results.get(index)

    def finish(self) -> list[Tensor]:
        """The constants that operations read, which must live as long as a graph of them; CaptureError if cut short."""
        if self._index != len(self._recording.names):
            self._recording.check(self._index, "the end")
        constants = {_storage(t) for result in self._recording.results.values() for t in tensors(result)}
        return list({_storage(t): t for t in self.used if _storage(t) in constants}.values())


def record(call: Callable[[], Any], inputs: Sequence[Tensor]) -> Recording:
    """Run `call`, whose inputs are `inputs`, and write down what in it is constant.

    The path that it takes without a graph is taken if that can be recorded, as its results are what parity asks for.
    Where that path needs a value on the host (whether a mask has a gap, say), the one that it keeps for captures is
    tried, and parity decides whether it is near enough.

    Raises CaptureError if a value that depends on the inputs reaches the host on both.
    """
    try:
        return _recorded(call, inputs, capturing=False)
    except CaptureError as error:
        try:
            return _recorded(call, inputs, capturing=True)
        except CaptureError:
            raise error from None


def _recorded(call: Callable[[], Any], inputs: Sequence[Tensor], capturing: bool) -> Recording:
    recording = Recording(capturing)
    recording.depends(inputs)
    first = _First(recording)
    with told(capturing), refusing_to_wait(), _HostData(first.host_data), first:
        call()
    return recording


def rerun(call: Callable[[], Any], recording: Recording) -> tuple[Any, list[Tensor]]:
    """Run `call` again without its constant operations; its result, and the constants that must be kept."""
    second = _Second(recording)
    with told(recording.capturing), _HostData(second.host_data), second:
        result = call()
    return result, second.finish()


def _storage(tensor: Tensor) -> Memory:
    return tensor.device.type, int(tensor.untyped_storage()._cdata)


def _undetermined(function: Any) -> bool:
    """Random numbers, and memory that has no content yet (a kernel that torch does not see may fill it)."""
    return torch.Tag.nondeterministic_seeded in function.tags or "empty" in function.name()


def _written(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> list[Tensor]:
    """The arguments that an operation changes, as its schema tells."""
    changed = []
    for index, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            positional = not argument.kwarg_only and index < len(args)
            changed += tensors(args[index] if positional else (kwargs or {}).get(argument.name))
    return changed


def _refuse_host(name: str, inputs: list[Tensor], together: list[Tensor]) -> None:
    """CaptureError if an operation on dependent values moves them between the host and a device, or waits for them.

    `together` are its inputs and results that must be in one place.
    """
    operation = name.removeprefix("aten::").split(".")[0]
    masked = operation in _INDEXING and any(tensor.dtype == torch.bool for tensor in inputs[1:])
    if operation in _TO_HOST or masked or len({tensor.device.type for tensor in together}) > 1:
        raise CaptureError(f"{name} brings a value that depends on the inputs (or on chance) to or from the host")


def _results(outputs: list[Tensor]) -> list[Tensor]:
    """What an operation was called for: without the random seed and offset that attention returns for its gradient.

    Outside a capture these are scalars on the host, made of nothing that a device computed.
    """
    return [tensor for tensor in outputs if tensor.ndim] or outputs
