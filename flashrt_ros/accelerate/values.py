"""Arguments and results as trees of tensors: their signatures, copies and leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Signature = tuple[Any, ...]
_PLAIN = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size)


def signature(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Signature:
    """A hashable description: shape, dtype, device and strides of each tensor, the value of each plain argument.

    Any other object counts as its type; whoever may not ignore its content asks `opaque`.
    """
    if not kwargs:
        return tuple([_described(value) for value in args])
    return (*[_described(value) for value in args], _described(kwargs))


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (value.shape, value.dtype, value.device, value.stride())
    if isinstance(value, _PLAIN):
        return (type(value), value)
    if isinstance(value, Mapping):
        return (type(value), *[(key, _described(item)) for key, item in value.items()])
    if isinstance(value, list | tuple):
        return (type(value), *[_described(item) for item in value])
    return type(value)


def tensors(tree: Any) -> list[Tensor]:
    """Every tensor of a tree, in its order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def needs_grad(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a tensor among the arguments asks for gradients."""
    return any(tensor.requires_grad for tensor in _walk((args, kwargs)))


def _walk(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _walk(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _walk(item)


def opaque(tree: Any) -> str:
    """Name of the type of the first leaf that is neither a tensor nor a plain value; empty if there is none."""
    return next((type(x).__name__ for x in pytree.tree_leaves(tree) if not isinstance(x, (Tensor, *_PLAIN))), "")


def mapped(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """`tree` with `function` of each tensor in the tensor's place."""
    return pytree.tree_map_only(Tensor, function, tree)


def cloned(tree: Any) -> Any:
    """A copy of `tree` with tensors of its own, equal strides included."""
    return mapped(lambda tensor: tensor.detach().clone(), tree)


def nbytes(tree: Any) -> int:
    """Bytes of all tensors of a tree."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors(tree))
