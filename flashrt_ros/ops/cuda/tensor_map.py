"""Tensor maps, by which the bulk copy engine of Hopper and later finds boxes of a matrix, and launches with them."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .errors import KernelError

Sizes = tuple[int, ...]

_BOX_LIMIT = 256
_ALIGNMENT = 16
_GROUP = 8  # rows over which the engine's widest swizzle repeats

_MAP_BYTES, _MAP_ALIGNMENT = 128, 64  # of the driver's CUtensorMap


class TensorMap:
    """One matrix, cut into boxes, as a kernel's `const __grid_constant__ TensorMap` parameter.

    It holds an address: whoever launches with it keeps the matrix alive.
    """

    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
        start = ctypes.addressof(self._memory)
        self.address = start + -start % _MAP_ALIGNMENT
        """Where the 128 bytes lie on the host."""


def tensor_map(matrix: Tensor, box: tuple[int, int], swizzle: int) -> TensorMap:
    """The map of `matrix` [rows, columns], remembered by address and shape.

    Args:
        matrix: bfloat16, or one byte a value, on a GPU; rows may be further apart than they are long.
        box: rows and columns that one copy moves, at most 256 each.
        swizzle: bytes over which the engine swizzles 16-byte groups in shared memory: 32, 64 or 128, the width of the
            box; 0 for none.
    """
    rows, columns = matrix.shape
    pitch = _pitch(matrix)
    return _encoded(matrix.data_ptr(), (columns, rows), (pitch,), matrix.dtype, (box[1], box[0]), swizzle)


def grouped_map(matrix: Tensor, groups: int, columns: int, *, apart: int = 0) -> TensorMap:
    """The map of `matrix` [outputs, inputs], whose boxes are `groups` groups of 8 rows by `columns` inputs.

    With `apart` a group is 8 rows and the 8 rows that far behind them: gates and ups of the same outputs, or both
    halves of a head, side by side in shared memory without being so in memory. Groups behind the last become zeros.

    Args:
        matrix: as for `tensor_map`; rows in multiples of 8.
        columns: of a box; the engine swizzles over all of their bytes, 128.
        apart: rows from one half of a group to the other, a multiple of 8; 0: a group is 8 rows.
    """
    outputs, inputs = matrix.shape
    pitch, ways = _pitch(matrix), 2 if apart else 1
    if outputs % _GROUP or apart % _GROUP or not 0 <= apart < outputs:
        raise KernelError(f"tensor map: {outputs} rows make no groups of {_GROUP} rows, {apart} apart")
    sizes = (inputs, _GROUP, ways, (outputs - apart) // _GROUP)
    pitches = (pitch, pitch * (apart or outputs), pitch * _GROUP)
    box = (columns, _GROUP, ways, groups)
    return _encoded(matrix.data_ptr(), sizes, pitches, matrix.dtype, box, columns * matrix.element_size())


def heads_map(tensor: Tensor, box: tuple[int, int], swizzle: int, *, of: int | None = None) -> TensorMap:
    """The map of `tensor` [rows, heads, head_dim], whose boxes are some rows and columns of all heads.

    In shared memory a head's rows lie together, one head behind the other. Rows and columns that are not there become
    zeros.

    Args:
        tensor: bfloat16 on a GPU; the heads of a row lie one behind the other, rows may be further apart.
        box, swizzle: as for `tensor_map`; rows and columns are those of a head.
        of: heads of a box, if not all.
    """
    rows, heads, head_dim = tensor.shape
    pitches = (_pitch(tensor.flatten(1)), head_dim * tensor.element_size())
    sizes = (head_dim, rows, heads)
    return _encoded(tensor.data_ptr(), sizes, pitches, tensor.dtype, (box[1], box[0], of or heads), swizzle)


def _pitch(matrix: Tensor) -> int:
    """Bytes from row to row."""
    pitch = matrix.stride(0) * matrix.element_size()
    if matrix.stride(1) != 1 or pitch % _ALIGNMENT or matrix.data_ptr() % _ALIGNMENT:
        raise KernelError(
            f"tensor map: rows must be contiguous and start at multiples of {_ALIGNMENT} bytes, got strides "
            f"{matrix.stride()} and address {matrix.data_ptr():#x}"
        )
    return pitch


@lru_cache(maxsize=4096)
def _encoded(
    address: int, sizes: Sizes, pitches: Sizes, dtype: torch.dtype, box: Sizes, swizzle: int
) -> TensorMap:  # fmt: skip
    """Sizes and boxes from the innermost dimension outwards, pitches in bytes from the second one on."""
    if not all(0 < size <= _BOX_LIMIT for size in box):
        raise KernelError(f"tensor map: a box has 1 to {_BOX_LIMIT} rows and columns, got {box[::-1]}")
    made, rank = TensorMap(), len(sizes)
    result = _encoder()(
        made.address,
        _BFLOAT16 if dtype == torch.bfloat16 else _UINT8,
        rank,
        address,
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*pitches),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        _NOT_INTERLEAVED,
        _SWIZZLES[swizzle],
        _FETCH_256,
        _ZEROS_OUTSIDE,
    )
    if result != 0:
        raise KernelError(
            f"tensor map: the driver refuses a matrix of {sizes[::-1]} {dtype}, {pitches} bytes apart, in boxes of "
            f"{box[::-1]} swizzled over {swizzle} bytes: error {result}"
        )
    return made


# Values of the driver's enumerations, from cuda.h.
_UINT8, _BFLOAT16 = 0, 9
_NOT_INTERLEAVED, _FETCH_256, _ZEROS_OUTSIDE = 0, 3, 0
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}


@lru_cache(maxsize=1)
def _encoder() -> Any:
    """The driver's cuTensorMapEncodeTiled. That of `cuda.bindings` does not align its map to 64 bytes."""
    encode = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    encode.restype = ctypes.c_int
    encode.argtypes = (
        ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, *[ctypes.c_void_p] * 4, *[ctypes.c_int] * 4
    )  # fmt: skip
    return encode


def launch_with_maps(
    kernel_handle: int,
    stream: int,
    grid: int,
    block: int,
    shared_bytes: int,
    arguments: tuple[TensorMap | ctypes._SimpleCData[Any], ...],
    *,
    overlap: bool,
) -> None:
    """Enqueue one launch of the driver's kernel `kernel_handle` on `stream`. `cuda.core` takes no structures."""
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
    config.sharedMemBytes = shared_bytes
    config.hStream = stream
    if overlap:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs = [attribute]
    config.numAttrs = int(overlap)
    places = [a.address if isinstance(a, TensorMap) else ctypes.addressof(a) for a in arguments]
    pointers = (ctypes.c_void_p * len(places))(*places)
    (result,) = driver.cuLaunchKernelEx(config, driver.CUfunction(kernel_handle), ctypes.addressof(pointers), 0)
    if int(result) != 0:
        raise KernelError(f"launch: the driver refuses it: {result.name}")
