"""The capsule copy as one kernel launch. Its reference is `flashrt_ros.engine.copier.copy_with_torch`."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ...engine.layout import Segment
from .compiler import KernelSource
from .kernel import kernel

SOURCE = KernelSource("capsule")
_THREADS = 256
_BYTES_A_BLOCK = 16 * _THREADS * 2  # two 16-byte units a thread: enough blocks to fill the GPU at a few megabytes
_CACHED_TABLES = 64

_Row = tuple[int, int, int, int, int]


class CapsuleCopy:
    """Copies all live segments of an arena on `device` in one launch on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kernel = kernel(SOURCE, "copy_regions", device)
        self._tables: dict[tuple[_Row, ...], torch.Tensor] = {}

    def __call__(self, arena: torch.Tensor, packed: torch.Tensor, segments: Iterable[Segment], gather: bool) -> None:
        """Arena to packed block (`gather`) or back; both uint8 on this device."""
        rows = tuple((s.source, s.pitch, s.blocks, s.live, s.packed) for s in segments if s.live)
        if not rows:
            return
        largest = max(blocks * live for _, _, blocks, live, _ in rows)
        grid = (max(1, -(-largest // _BYTES_A_BLOCK)), len(rows))
        self._kernel.launch(grid, _THREADS, arena, packed, self._table(rows), int(gather))

    def _table(self, rows: tuple[_Row, ...]) -> torch.Tensor:
        table = self._tables.get(rows)
        if table is None:
            if len(self._tables) >= _CACHED_TABLES:
                self._tables.clear()
            table = torch.tensor(rows, dtype=torch.int64).to(self._device)
            self._tables[rows] = table
        return table
