"""How a matrix product of kernels/gemm.cu is cut into tiles, and what a block holds of one in shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from .errors import KernelError

# Rows of a tile, by consumers (warpgroups that multiply): each thread has registers for so many sums.
MOST_ROWS = {2: 256, 3: 240}
STEP_BYTES = 128  # of a row of x or of the weights, in one stage
GROUP = 8  # rows of an instruction's tile
SHARED_BYTES = 232448  # that a block may have
_CONSUMER_COLUMNS = 64  # weight rows of a tile, for each consumer
_TILE_OVERHEAD = 16  # what a tile costs beside its products, in rows
_TILE_COUNTS = 11  # numbers of tiles that are considered; lower tiles fetch each weight too often
_MOST_STAGES = 8
_MOST_BLOCKS, _SHARING_CONSUMERS = 8, 2  # of a cluster; where blocks fetch for each other
# Bytes of a product from which on blocks had better fetch for each other: with less, what they wait for is not the
# second-level cache (measured on an H200, docs/performance.md).
_SHARED_FROM = 24 << 20


@dataclass(frozen=True)
class Tiling:
    """One way to cut a product.

    Attributes:
        consumers: warpgroups of a block that multiply.
        rows: of x, in a tile.
        waves: tiles, one behind the other, of the multiprocessor that has most.
    """

    consumers: int
    rows: int
    waves: int

    @property
    def cost(self) -> tuple[int, int, int]:
        """The least is taken to be the fastest: what the busiest multiprocessor computes, as rows of one consumer. At
        equal rows fewer waves, as each ends in an epilogue that nothing hides (on an H200 four waves of three consumers
        take 5 % less than six of two). At equal waves two consumers, whose taller tiles fetch less."""
        return self.waves * self.consumers * (self.rows + _TILE_OVERHEAD), self.waves, self.consumers


@lru_cache(maxsize=128)
def tiling(
    rows: int, outputs: int, parts: int, processors: int, consumers: int | None = None, tile_rows: int | None = None
) -> Tiling:
    """The way to cut a product that ends soonest, all tiles dealt in waves to all multiprocessors.

    Args:
        rows: of x.
        outputs: weight rows.
        parts: that K is cut into.
        processors: of the GPU.
        consumers, tile_rows: what is chosen already.

    Raises:
        KernelError: no consumer has registers for `tile_rows`.
    """

    def of(count: int, tile: int) -> Tiling:
        return Tiling(count, tile, -(-(-(-rows // tile) * -(-outputs // columns(count)) * parts) // processors))

    found = [
        of(count, tile)
        for count in ((consumers,) if consumers else MOST_ROWS)
        for tile in ((tile_rows,) if tile_rows else _heights(rows, count))
        if tile <= MOST_ROWS[count]
    ]
    if not found:
        asked = consumers or " or ".join(map(str, MOST_ROWS))
        raise KernelError(f"{asked} consumers have no registers for tiles of {tile_rows} rows")
    return min(found, key=lambda way: way.cost)


def _heights(rows: int, consumers: int) -> list[int]:
    """Rows of the tiles of the few least numbers of tiles."""
    smallest = -(-rows // MOST_ROWS[consumers])
    return [GROUP * -(-rows // (GROUP * count)) for count in range(smallest, smallest + _TILE_COUNTS)]


def columns(consumers: int) -> int:
    """Weight rows of a tile."""
    return _CONSUMER_COLUMNS * consumers


@dataclass(frozen=True)
class Sharing:
    """Which blocks of a cluster fetch for each other, see kernels/gemm_sharing.cuh.

    Attributes:
        x: blocks that need the same x.
        weights: blocks that need the same weights.
    """

    x: int
    weights: int

    @classmethod
    def of(cls, defines: Mapping[str, int]) -> Sharing:
        """The kernel's compile-time choices; KernelError if it has no code for them."""
        made = cls(defines["SHARE_X"], defines["SHARE_WEIGHTS"])
        if min(made.x, made.weights) < 1 or made.x * made.weights > _MOST_BLOCKS:
            raise KernelError(f"SHARE_X {made.x} and SHARE_WEIGHTS {made.weights} make no 1 to {_MOST_BLOCKS} blocks")
        if made.x * made.weights > 1 and defines["CONSUMERS"] != _SHARING_CONSUMERS:
            raise KernelError(f"SHARE_X, SHARE_WEIGHTS: CONSUMERS must be {_SHARING_CONSUMERS}")
        return made

    @classmethod
    def best(cls, cut: Tiling, rows: int, outputs: int, parts: int, row_bytes: int, processors: int) -> Sharing:
        """The best known one for codes.

        Args:
            cut: how the product is cut.
            rows, outputs, parts, processors: as for `tiling`.
            row_bytes: of a row of x or of the weights.
        """
        row_tiles, column_tiles = -(-rows // cut.rows), -(-outputs // columns(cut.consumers))
        fetched = row_tiles * column_tiles * (cut.rows + columns(cut.consumers)) * row_bytes
        if cut.consumers == _SHARING_CONSUMERS and cut.waves == 1 and fetched >= _SHARED_FROM:
            for way in (cls(2, 2), cls(2, 1)):
                size = way.x * way.weights
                if way._clusters(row_tiles, column_tiles, parts) <= clusters_at_once(size, processors):
                    return way
        return cls(1, 1)

    def rows(self, tile: int) -> int:
        """Rows of x, of a tile of so many, that a block fetches."""
        return GROUP * -(-tile // (GROUP * self.x))

    def groups(self, count: int) -> int:
        """Groups of weight rows, of a tile of so many, that a block fetches."""
        return -(-count // self.weights)

    def blocks(self, row_tiles: int, column_tiles: int, parts: int, processors: int) -> int:
        """Blocks of a launch; KernelError where sharing would give one of them more than one tile."""
        blocks = self._clusters(row_tiles, column_tiles, parts) * self.x * self.weights
        if self.x * self.weights == 1:
            return min(processors, blocks)
        if blocks > processors:
            raise KernelError(f"SHARE_X, SHARE_WEIGHTS: {blocks} tiles, of which {processors} processors take one each")
        return blocks

    def _clusters(self, row_tiles: int, column_tiles: int, parts: int) -> int:
        return -(-row_tiles // self.weights) * -(-column_tiles // self.x) * parts


def clusters_at_once(size: int, processors: int) -> int:
    """About how many clusters of so many blocks a GPU runs at once, where a block takes a multiprocessor.

    The multiprocessors of a cluster are neighbours, and groups of neighbours do not come out even: an H200 with 132 of
    them runs 66 clusters of 2, 30 of 4 and 15 of 8. Where it is one more than there is room for, that one runs later.
    """
    return (processors - (processors // 11 if size > 2 else 0)) // size


def inverse_of_divisor(divisor: int, most: int) -> int:
    """What a kernel multiplies a number by, of which the upper 32 of 64 bits are number // divisor; 0 for divisor 1,
    by which it does not divide.

    Exact for numbers below divisor * most: with i = 2**32 // divisor + 1, number * i / 2**32 is number / divisor and at
    most number / 2**32 more, which is less than the 1 / divisor that is missing to the next integer.

    Raises:
        KernelError: not for so many.
    """
    if divisor * divisor * most >= 1 << 32:
        raise KernelError(f"{divisor} x {most} tiles are more than the kernel counts")
    return 0 if divisor == 1 else (1 << 32) // divisor + 1


@dataclass(frozen=True)
class OutLayout:
    """How a consumer stages its output, see kernels/gemm_epilogue.cuh.

    Attributes:
        box: rows and columns that one copy stores.
        line_bytes: of one staged row.
        nbytes: shared memory for it.
    """

    box: tuple[int, int]
    line_bytes: int
    nbytes: int

    @classmethod
    def of(cls, defines: Mapping[str, int]) -> OutLayout:
        """The layout by the kernel's compile-time choices."""
        tile, codes, rotary = defines["TILE_ROWS"], defines.get("OUT8", 0), defines.get("ROTARY", 0)
        unit = GROUP * (1 + codes)  # rows that are staged in the same lines: a line holds one row, or two of codes
        units, usual = -(-tile // unit), 1 if codes or rotary or tile == GROUP else 2
        chunks = defines.get("CHUNKS", usual)
        width = _CONSUMER_COLUMNS // (1 + (defines.get("GEGLU", 0) or rotary))
        largest = -(-units // chunks)
        box_rows = unit * (largest if units % chunks == 0 else 1)
        return cls((box_rows, width), 2 * width, GROUP * largest * 2 * width * (1 + rotary))  # both halves of a head


def stages(defines: Mapping[str, int]) -> int:
    """Stages of the ring: as many as there is memory for, up to where more gain nothing."""
    return max(n for n in range(2, _MOST_STAGES + 1) if shared_bytes({**defines, "STAGES": n}) <= SHARED_BYTES)


def shared_bytes(defines: Mapping[str, int]) -> int:
    """Shared memory of a block: the ring, then output of all consumers, scales if rows have any, and barriers."""
    tile, consumers, ring = defines["TILE_ROWS"], defines["CONSUMERS"], defines["STAGES"]
    stage, scales = (columns(consumers) + tile) * STEP_BYTES, 4 * tile * defines.get("ROW_SCALE", 0)
    return ring * (stage + 2 * 8) + consumers * (OutLayout.of(defines).nbytes + scales)
