"""Which structures there are: those of `flashrt_ros.accelerate.structures`, and those that a user registers."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import AccelerateError
from .structure import KINDS, Structure

_registered: dict[str, Structure] = {}


def register(structure: Structure) -> Structure:
    """Add `structure` for every later `accelerate`; AccelerateError if its name is taken or its kind unknown."""
    if structure.kind not in KINDS:
        raise AccelerateError(f"structure '{structure.name}' has kind {structure.kind!r}, expected {', '.join(KINDS)}")
    if structure.name in {known.name for known in available_structures()}:
        raise AccelerateError(f"a structure called '{structure.name}' is registered already; unregister it first")
    _registered[structure.name] = structure
    return structure


def unregister(name: str) -> None:
    """Take a structure out that `register` added."""
    if _registered.pop(name, None) is None:
        raise AccelerateError(f"no structure '{name}' was registered; there are: {', '.join(_registered) or 'none'}")


@contextmanager
def registered(structure: Structure) -> Iterator[None]:
    """`structure` is registered within the block."""
    register(structure)
    try:
        yield
    finally:
        unregister(structure.name)


def available_structures() -> tuple[Structure, ...]:
    """All of them: each module of `structures` lists its own in STRUCTURES."""
    package = importlib.import_module(f"{__package__}.structures")
    names = sorted(info.name for info in pkgutil.iter_modules(package.__path__))
    modules = [importlib.import_module(f"{package.__name__}.{name}") for name in names]
    return (*(structure for module in modules for structure in module.STRUCTURES), *_registered.values())
