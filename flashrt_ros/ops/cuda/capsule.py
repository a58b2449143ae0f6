"""The capsule copy as one kernel launch. Its reference is `flashrt_ros.engine.copier.copy_with_torch`."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence

import torch

from ...engine.layout import PACKING, Segment
from .compiler import KernelSource
from .errors import KernelError
from .kernel import Kernel, kernel
from .prepared import PreparedLaunch

_THREADS = 256
_UNITS = 4  # a thread; 16 KiB a thread block: 10 MB are one wave of the GPU, and every load of it is in flight at once
_TILE = _THREADS * _UNITS
_SEGMENTS = 32  # of one launch; the table is an argument, and those have 4 KiB
_MAX_UNITS = 2**32 - _TILE  # of a piece; the kernel counts them in 32 bits


class _SegmentEntry(ctypes.Structure):
    """One row of the kernel's table, as kernels/capsule.cu explains it."""

    _fields_ = (
        ("source", ctypes.c_int64),
        ("pitch", ctypes.c_int64),
        ("live", ctypes.c_int64),
        ("packed", ctypes.c_int64),
        ("first_tile", ctypes.c_uint32),
        ("piece_tiles", ctypes.c_uint32),
        ("units", ctypes.c_uint32),
        ("wide", ctypes.c_uint32),
    )


class _Table(ctypes.Structure):
    _fields_ = (("segments", _SegmentEntry * _SEGMENTS), ("count", ctypes.c_int64))


SOURCE = KernelSource(
    "capsule",
    {
        "SEGMENTS": _SEGMENTS,
        "TABLE_BYTES": ctypes.sizeof(_Table),
        "BLOCK_THREADS": _THREADS,
        "UNITS": _UNITS,
    },
)


class CapsuleCopy:
    """Prepares copies between arenas and packed blocks on `device`: one launch for all segments."""

    def __init__(self, device: torch.device) -> None:
        self._kernel = kernel(SOURCE, "copy_regions", device)

    def __call__(self, arena: torch.Tensor, segments: Sequence[Segment]) -> PreparedCopy:
        """See `CopyRegions`; `arena` is uint8 on the device and stays where it is."""
        return PreparedCopy(self._kernel, arena, segments)


class PreparedCopy:
    """The copy of certain segments of one arena: a call for the block of the last one only launches."""

    __slots__ = ("_aimed_at", "_arena", "_gather", "_packed", "_scatter")

    def __init__(self, copy_regions: Kernel, arena: torch.Tensor, segments: Sequence[Segment]) -> None:
        self._arena = arena  # kept alive
        self._packed = ctypes.c_void_p()
        self._aimed_at: Callable[[], torch.Tensor | None] = _nothing  # whose address `_packed` is; not kept alive
        live = [segment for segment in segments if segment.nbytes]
        tables = [fill_table(live[i : i + _SEGMENTS]) for i in range(0, len(live), _SEGMENTS)]
        address = ctypes.c_void_p(arena.data_ptr())

        def launches(gather: bool) -> tuple[PreparedLaunch, ...]:
            before = (address, self._packed, ctypes.c_int(gather))
            return tuple(PreparedLaunch(copy_regions, tiles, _THREADS, (*before, table)) for table, tiles in tables)

        self._gather, self._scatter = launches(True), launches(False)

    def __call__(self, packed: torch.Tensor, gather: bool) -> None:
        """Arena to `packed` (`gather`) or back, on the current stream; uint8 on the arena's device, 16-byte aligned."""
        if self._aimed_at() is not packed:
            self._aim(packed)
        for launch in self._gather if gather else self._scatter:
            launch()

    def _aim(self, packed: torch.Tensor) -> None:
        """Write the block's address, for which asking torch and ctypes takes as long as a launch, if code is cold."""
        address = packed.data_ptr()
        if address % PACKING:
            raise KernelError(f"a packed block begins at {address:#x}; give one that is aligned to {PACKING} bytes")
        self._packed.value, self._aimed_at = address, weakref.ref(packed)


def _nothing() -> None:
    return None


def fill_table(segments: Sequence[Segment]) -> tuple[_Table, int]:
    """The kernel's table of at most 32 segments that are not empty, and how many tiles they are."""
    table, tiles = _Table(count=len(segments)), 0
    for row, segment in zip(table.segments, segments, strict=False):
        row.source, row.pitch, row.live, row.packed = segment.source, segment.pitch, segment.live, segment.packed
        row.wide = (segment.source | segment.pitch | segment.live | segment.packed) % PACKING == 0
        unit = PACKING if row.wide else 1
        units = segment.live // unit
        if units > _MAX_UNITS:
            raise KernelError(
                f"region '{segment.region.name}' has pieces of {segment.live} live bytes, a copy takes at most "
                f"{_MAX_UNITS * unit}; split the region into more blocks"
            )
        row.units, row.first_tile, row.piece_tiles = units, tiles, -(-units // _TILE)
        tiles += segment.blocks * row.piece_tiles
    return table, tiles
