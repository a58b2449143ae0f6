"""Arguments and results as trees of tensors: their signatures, copies and leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Check = Callable[[tuple[Any, ...], Mapping[str, Any]], bool]
_PLAIN = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size)


class Signature(NamedTuple):
    """What a call was like: a hashable description of its positional and of its keyword arguments."""

    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]


class Form(NamedTuple):
    """What a signature says of a tensor; `strides` is None where a layout has none."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    strides: tuple[int, ...] | None


class Nest(NamedTuple):
    """What a signature says of a mapping, a list or a tuple: its type, its keys (None where it has none), its items."""

    kind: type
    keys: tuple[Any, ...] | None
    items: tuple[Any, ...]


class Plain(NamedTuple):
    """What a signature says of a plain argument. 1, 1.0 and True are equal, so the type is part of it."""

    kind: type
    value: Any


def signature(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Signature:
    """Shape, dtype, device and strides of each tensor, the value of each plain argument, and how they are nested.

    Any other object counts as its type; whoever may not ignore its content asks `opaque`.
    """
    return Signature(
        tuple([_described(value) for value in args]),
        tuple([(name, _described(value)) for name, value in kwargs.items()]),
    )


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Form(value.shape, value.dtype, value.device, _strides(value))
    kind = type(value)
    if isinstance(value, _PLAIN):
        return Plain(kind, value)
    if isinstance(value, Mapping):
        return Nest(kind, tuple(value), tuple([_described(item) for item in value.values()]))
    if isinstance(value, list | tuple):
        return Nest(kind, None, tuple([_described(item) for item in value]))
    return kind


def _strides(tensor: Tensor) -> tuple[int, ...] | None:
    return tensor.stride() if tensor.layout is torch.strided else None


def checker(known: Signature) -> Check:
    """A function that tells of (args, kwargs) whether `known` is their signature, without making that.

    Guards ask it in every call, so it is compiled to one expression: half the time of building and looking up.
    """
    source = _Source()
    source.sequence("args", known.args)
    source.mapping("kwargs", tuple(name for name, _ in known.kwargs), [described for _, described in known.kwargs])
    check: Check = eval(f"lambda args, kwargs: {' and '.join(source.conditions)}", source.constants)
    return check


class _Source:
    """Conditions in Python's own words. What they compare with has a name each, so no text of a caller gets into them.

    `value` is always the name of a variable, which is set (`:=`) by the condition before those that read it.
    """

    def __init__(self) -> None:
        self.conditions: list[str] = []
        self.constants: dict[str, Any] = {"Tensor": Tensor, "strided": torch.strided}
        self._variables = 0

    def sequence(self, value: str, items: Sequence[Any]) -> None:
        self.conditions.append(f"len({value}) == {len(items)}")
        for index, described in enumerate(items):
            self._add(f"{value}[{index}]", described)

    def mapping(self, value: str, keys: tuple[Any, ...], items: Sequence[Any]) -> None:
        """Keys in their order too, as that is the order of the tensors."""
        self.conditions.append(f"tuple({value}) == {self._constant(keys)}" if keys else f"not {value}")
        for key, described in zip(keys, items, strict=True):
            self._add(f"{value}[{self._constant(key)}]", described)

    def _add(self, place: str, described: Any) -> None:
        value = f"value{self._variables}"
        self._variables += 1
        if isinstance(described, Form):
            shape, dtype, device, strides = map(self._constant, described)
            self.conditions += [
                f"isinstance({value} := {place}, Tensor)",
                f"{value}.shape == {shape}",
                f"{value}.dtype is {dtype}",
                f"{value}.device == {device}",
                f"({value}.stride() if {value}.layout is strided else None) == {strides}",
            ]
            return
        kind = described if isinstance(described, type) else described.kind
        self.conditions.append(f"type({value} := {place}) is {self._constant(kind)}")
        if isinstance(described, Plain):
            self.conditions.append(f"{value} == {self._constant(described.value)}")
        elif isinstance(described, Nest):
            self._nest(value, described)

    def _nest(self, value: str, nest: Nest) -> None:
        if nest.keys is None:
            self.sequence(value, nest.items)
        else:
            self.mapping(value, nest.keys, nest.items)

    def _constant(self, value: Any) -> str:
        name = f"constant{len(self.constants)}"
        self.constants[name] = value
        return name


def tensors(tree: Any) -> list[Tensor]:
    """Every tensor of a tree, in its order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def argument_tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """`tensors` of arguments of which a signature shows everything, in a tenth of the time."""
    found: list[Tensor] = []
    _gather(args, found)
    _gather(kwargs, found)
    return found


def _gather(tree: Any, found: list[Tensor]) -> None:
    for value in tree.values() if isinstance(tree, Mapping) else tree:
        if isinstance(value, Tensor):
            found.append(value)
        elif not isinstance(value, _PLAIN) and isinstance(value, (dict, list, tuple, Mapping)):
            _gather(value, found)


def needs_grad(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a tensor among the arguments asks for gradients."""
    return any(tensor.requires_grad for tensor in argument_tensors(args, kwargs))


def opaque(tree: Any) -> str:
    """Name of the type of the first leaf that is neither a tensor nor a plain value; empty if there is none."""
    return next((type(x).__name__ for x in pytree.tree_leaves(tree) if not isinstance(x, (Tensor, *_PLAIN))), "")


def mapped(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """`tree` with `function` of each tensor in the tensor's place."""
    return pytree.tree_map_only(Tensor, function, tree)


def cloned(tree: Any) -> Any:
    """A copy of `tree` with tensors of its own, equal strides included."""
    return mapped(lambda tensor: tensor.detach().clone(), tree)


def copier(tree: Any) -> Callable[[], Any]:
    """A function that gives `cloned(tree)` of the content that its tensors then have; the tree is taken apart once."""
    if isinstance(tree, Tensor):
        return tree.detach().clone
    leaves, shape = pytree.tree_flatten(tree)
    kept = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def copy() -> Any:
        return pytree.tree_unflatten([leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in kept], shape)

    return copy


def nbytes(tree: Any) -> int:
    """Bytes of all tensors of a tree."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors(tree))
