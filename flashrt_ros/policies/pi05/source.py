"""Where the tensors of a checkpoint come from: a file, or a seed."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..base import CheckpointError
from .config import Pi05Config
from .layout import Shape, canonical_names, check_tensors

_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # type in the file → bytes of a value


class TensorSource(Protocol):
    """Tensors by LeRobot's names, without the leading `model.`."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every name, sorted."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""

    def tensor(self, name: str) -> Tensor:
        """The tensor called `name`, on the CPU; must not be written to."""


class FileSource:
    """A safetensors file, checked against a configuration without reading its data.

    Raises CheckpointError if the file is missing or corrupt, a tensor is not of floats, or the tensors do not fit
    `config`, naming every missing, surplus and misshapen one.
    """

    def __init__(self, path: Path, config: Pi05Config) -> None:
        self._path = path
        try:
            opened: Any = safe_open(path, framework="pt")  # has no type information
            self._file = opened
            self._stored = canonical_names(self._file.keys())
            self.nbytes = 0
            shapes = {name: self._shape(stored) for name, stored in self._stored.items()}
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read weights '{path}': {error}; copy the file again") from None
        check_tensors(shapes, config, f"'{path}'")

    def _shape(self, stored: str) -> Shape:
        view = self._file.get_slice(stored)
        size = _FLOATS.get(view.get_dtype())
        if size is None:
            raise CheckpointError(
                f"'{self._path}': tensor '{stored}' is {view.get_dtype()}, expected one of {tuple(_FLOATS)}"
            )
        shape = tuple(view.get_shape())
        self.nbytes += math.prod(shape) * size
        return shape

    @property
    def names(self) -> tuple[str, ...]:
        """Every name, sorted."""
        return tuple(sorted(self._stored))

    def tensor(self, name: str) -> Tensor:
        """The tensor called `name`, mapped from the file."""
        tensor: Tensor = self._file.get_tensor(self._stored[name])
        return tensor


class MemorySource:
    """Tensors that are in memory already, checked in the same way."""

    def __init__(self, tensors: Mapping[str, Tensor], config: Pi05Config, where: str) -> None:
        self._tensors = {name: tensors[stored] for name, stored in canonical_names(tensors).items()}
        check_tensors({name: tuple(t.shape) for name, t in self._tensors.items()}, config, where)
        self.nbytes = sum(tensor.nbytes for tensor in self._tensors.values())

    @property
    def names(self) -> tuple[str, ...]:
        """Every name, sorted."""
        return tuple(sorted(self._tensors))

    def tensor(self, name: str) -> Tensor:
        """The tensor called `name`."""
        return self._tensors[name]


def digest(source: TensorSource) -> str:
    """SHA-256 over names, types, shapes and bytes of all tensors; independent of the file around them."""
    with ThreadPoolExecutor() as pool:  # hashing releases the interpreter, so a large checkpoint uses every core
        parts = pool.map(lambda name: _tensor_digest(name, source.tensor(name)), source.names)
        return hashlib.sha256(b"".join(parts)).hexdigest()


def _tensor_digest(name: str, tensor: Tensor) -> bytes:
    sha = hashlib.sha256(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
    sha.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return sha.digest()
