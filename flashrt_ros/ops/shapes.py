"""Shape checks at the host boundary: every op states its shapes once, in symbols."""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

Spec = str | tuple[str | int, ...]
"""Dimensions, outermost first: a name binds on first use and must agree afterwards, an integer is fixed."""


class ShapeError(ValueError):
    """A tensor does not have the shape that an op needs; the message names op, argument and dimension."""


def check(op: str, /, **arguments: tuple[Tensor, Spec]) -> None:
    """Raise ShapeError unless every argument of `op` fits its spec.

    `check("rms_norm", x=(x, "rows width"), w=(w, "width"))` also demands that both widths agree. Verdicts are
    remembered by shape, so that a call in the hot loop costs a look-up.
    """
    _verify(op, tuple((name, spec, tuple(tensor.shape)) for name, (tensor, spec) in arguments.items()))


@lru_cache(maxsize=4096)
def _verify(op: str, arguments: tuple[tuple[str, Spec, tuple[int, ...]], ...]) -> None:
    bound: dict[str, tuple[int, str]] = {}
    for argument, spec, shape in arguments:
        dims = tuple(_number(part) for part in spec.split()) if isinstance(spec, str) else spec
        if len(dims) != len(shape):
            wanted = ", ".join(str(dim) for dim in dims)
            raise ShapeError(f"{op}: '{argument}' needs {len(dims)} dimensions [{wanted}], got {list(shape)}")
        for axis, (dim, got) in enumerate(zip(dims, shape, strict=True)):
            _bind(op, argument, axis, dim, got, bound)


def _number(part: str) -> str | int:
    return int(part) if part.isdecimal() else part


def _bind(op: str, argument: str, axis: int, dim: str | int, got: int, bound: dict[str, tuple[int, str]]) -> None:
    if isinstance(dim, int):
        expected, reason = dim, "fixed"
    else:
        expected, reason = bound.setdefault(dim, (got, argument))
        reason = f"from '{reason}'"
    if got != expected:
        label = f"dimension {axis}" if isinstance(dim, int) else f"dimension {axis} '{dim}'"
        raise ShapeError(f"{op}: '{argument}' {label} must be {expected} ({reason}), got {got}")
