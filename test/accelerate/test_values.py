"""What the signature of a call tells apart, the compiled check of it, and trees that are taken apart once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from flashrt_ros.accelerate.values import argument_tensors, checker, copier, signature, tensors

X = torch.zeros(2, 3)

# Calls of which no two are alike.
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "nothing": ((), {}),
    "tensor": ((X,), {}),
    "shape": ((torch.zeros(3, 2),), {}),
    "rank": ((torch.zeros(1, 2, 3),), {}),
    "dtype": ((X.double(),), {}),
    "device": ((X.to("meta"),), {}),
    "strides": ((torch.zeros(3, 2).t(),), {}),
    "sparse": ((X.to_sparse(),), {}),
    "two": ((X, X), {}),
    "by name": ((), {"x": X}),
    "other name": ((), {"y": X}),
    "by name and plain": ((), {"x": X, "n": 1}),
    "other order": ((), {"n": 1, "x": X}),
    "mapping": (({"x": X},), {}),
    "ordered mapping": ((OrderedDict(x=X),), {}),
    "read-only mapping": ((MappingProxyType({"x": X}),), {}),
    "empty mapping": (({},), {}),
    "keys that are no names": (({1: X, "it's": X},), {}),
    "list": (([X],), {}),
    "tuple": (((X,),), {}),
    "empty list": (([],), {}),
    "nested": (([X, {"a": (X, 1)}],), {}),
    "nested otherwise": (([X, {"a": (X, 2)}],), {}),
    "whole number": ((1,), {}),
    "another number": ((2,), {}),
    "truth": ((True,), {}),
    "fraction": ((1.0,), {}),
    "text": (("1",), {}),
    "none": ((None,), {}),
    "size": ((torch.Size((1, 2)),), {}),
    "two numbers": (((1, 2),), {}),
    "a type of numbers": ((torch.float32,), {}),
    "a place": ((torch.device("cpu"),), {}),
    "an object": ((object(),), {}),
    "a module": ((nn.Identity(),), {}),
    "a type": ((int,), {}),
}


@pytest.mark.parametrize("known", CALLS)
def test_the_compiled_check_accepts_calls_like_its_own_and_no_others(known: str) -> None:
    check = checker(signature(*CALLS[known]))
    assert [name for name, call in CALLS.items() if check(*call)] == [known]
    assert [name for name, call in CALLS.items() if signature(*call) == signature(*CALLS[known])] == [known]


def test_values_of_tensors_and_contents_of_objects_do_not_count() -> None:
    check = checker(signature((X, nn.Identity()), {"x": [X]}))
    assert check((torch.ones(2, 3), nn.Identity()), {"x": [nn.Parameter(X)]})


def test_tensors_of_arguments_come_in_their_order() -> None:
    a, b, c, d = (torch.full((1,), float(index)) for index in range(4))
    args, kwargs = ({"b": a, "a": [b, 1, "text"]},), {"z": (c, None, torch.Size((1,))), "a": d}
    assert [id(t) for t in argument_tensors(args, kwargs)] == [id(t) for t in tensors((args, kwargs))]
    assert [float(t) for t in argument_tensors(args, kwargs)] == [0, 1, 2, 3]


TREES: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda x: x,
    "parameter": lambda x: nn.Parameter(x),
    "nested": lambda x: {"a": [x, 1], "b": (x.t(), None)},
}


@pytest.mark.parametrize("tree", TREES)
def test_copies_have_the_content_of_the_moment_and_memory_of_their_own(tree: str) -> None:
    x = torch.zeros(2, 3)
    original = TREES[tree](x)
    copy = copier(original)
    first = copy()
    x.fill_(1)
    second = copy()
    assert type(second) is (torch.Tensor if isinstance(original, torch.Tensor) else type(original))
    for old, new, source in zip(tensors(first), tensors(second), tensors(original), strict=True):
        assert not old.any()
        assert new.all()
        assert not new.requires_grad
        assert new.stride() == source.stride()
        assert new.data_ptr() not in (old.data_ptr(), source.data_ptr())
    leaves = [leaf for leaf in pytree.tree_leaves(second) if not isinstance(leaf, torch.Tensor)]
    assert leaves == ([1, None] if tree == "nested" else [])
