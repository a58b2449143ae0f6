"""How matrix products are cut for an H200: consumers, rows of a tile, memory of a block."""

from __future__ import annotations

import pytest

from flashrt_ros.ops.cuda.errors import KernelError
from flashrt_ros.ops.cuda.gemm_tiling import (
    SHARED_BYTES,
    OutLayout,
    Sharing,
    Tiling,
    clusters_at_once,
    columns,
    inverse_of_divisor,
    shared_bytes,
    stages,
    tiling,
)

H200 = 132
GATE_UP = 32768


@pytest.mark.parametrize(
    ("rows", "outputs", "parts", "consumers", "tile"),
    [
        (712, GATE_UP, 1, 3, 240),  # as many products in four waves as in six of two consumers
        (560, GATE_UP, 1, 3, 192),
        (968, GATE_UP, 1, 2, 248),  # four tiles of rows: no tiles of 240 are as low
        (712, 2048, 4, 3, 240),  # one wave of 132 tiles; two consumers have 176, 192 or 256 of them
        (712, 2048, 3, 3, 184),
        (456, 2048, 4, 2, 232),
        (968, 2048, 4, 2, 248),
        (712, 2048, 1, 2, 96),
        (512, 3456, 1, 2, 128),  # equal products, equal waves
        (512, 1152, 1, 2, 48),  # 9 tiles of outputs: 11 tiles of rows fill most multiprocessors
        (512, 1152, 3, 2, 128),
        (512, 4352, 1, 3, 104),  # one wave of 115 tiles; two consumers have 102, larger by an eighth
        (1, 2048, 1, 2, 8),
    ],
)
def test_products_are_cut_so_that_they_end_soonest(
    rows: int, outputs: int, parts: int, consumers: int, tile: int
) -> None:
    found = tiling(rows, outputs, parts, H200)
    assert (found.consumers, found.rows) == (consumers, tile)
    assert all(found.cost <= tiling(rows, outputs, parts, H200, count).cost for count in (2, 3))


@pytest.mark.parametrize(("rows", "tile"), [(712, 240), (968, 248), (560, 192), (1, 8), (256, 256), (257, 136)])
def test_tiles_of_two_consumers_waste_few_rows(rows: int, tile: int) -> None:
    assert tiling(rows, GATE_UP, 1, H200, 2).rows == tile


@pytest.mark.parametrize(("rows", "tile"), [(512, 104), (256, 56), (768, 160)])
def test_tiles_of_three_consumers_are_lower(rows: int, tile: int) -> None:
    assert tiling(rows, 4352, 1, H200, 3).rows == tile


def test_waves_count_the_tiles_of_the_busiest_multiprocessor() -> None:
    assert tiling(712, GATE_UP, 1, H200, 2) == Tiling(2, 240, 6)  # 3 x 256 tiles
    assert tiling(712, GATE_UP, 1, H200, 3) == Tiling(3, 240, 4)  # 3 x 171
    assert tiling(712, 2048, 4, H200, 3) == Tiling(3, 240, 1)  # 3 x 11 x 4


@pytest.mark.parametrize(("tile", "consumers"), [(240, 3), (248, 2), (256, 2)])
def test_consumers_follow_from_a_chosen_height(tile: int, consumers: int) -> None:
    assert tiling(712, GATE_UP, 1, H200, tile_rows=tile) == tiling(712, GATE_UP, 1, H200, consumers, tile)
    assert tiling(712, GATE_UP, 1, H200, tile_rows=tile).consumers == consumers


def test_tiles_without_registers_for_their_sums_are_refused() -> None:
    with pytest.raises(KernelError, match="3 consumers have no registers for tiles of 256 rows"):
        tiling(712, GATE_UP, 1, H200, 3, 256)
    with pytest.raises(KernelError, match="2 or 3 consumers have no registers for tiles of 264 rows"):
        tiling(712, GATE_UP, 1, H200, tile_rows=264)


BEHIND: tuple[dict[str, int], ...] = (
    {},
    {"OUT8": 1},
    {"OUT8": 1, "GEGLU": 1},
    {"GEGLU": 1, "ROW_SCALE": 1},
    {"GELU": 1},
)


@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize("consumers", [2, 3])
@pytest.mark.parametrize("rows", [*range(1, 1100, 61), 712, 968])
def test_every_tile_is_one_that_the_instruction_has_and_fits(rows: int, consumers: int, behind: dict[str, int]) -> None:
    tile = tiling(rows, GATE_UP, 1, H200, consumers).rows
    assert tile % 8 == 0
    assert 8 <= tile <= {2: 256, 3: 240}[consumers]
    assert stages({"TILE_ROWS": tile, "CONSUMERS": consumers, **behind}) >= {2: 4, 3: 3}[consumers]


@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize(("tile", "ring"), [(8, 8), (104, 5), (184, 4), (240, 3)])
def test_three_consumers_share_the_memory_of_a_block(tile: int, ring: int, behind: dict[str, int]) -> None:
    defines = {"TILE_ROWS": tile, "CONSUMERS": 3, **behind}
    bytes_of_consumer = OutLayout.of(defines).nbytes + 4 * tile * behind.get("ROW_SCALE", 0)
    assert stages(defines) == ring
    nbytes = shared_bytes({**defines, "STAGES": ring})
    assert nbytes == ring * ((192 + tile) * 128 + 2 * 8) + 3 * bytes_of_consumer  # two barriers for each stage
    assert nbytes <= SHARED_BYTES


@pytest.mark.parametrize("behind", [{"OUT8": 1, "GEGLU": 1, "CHUNKS": 3}, {"GEGLU": 1, "CHUNKS": 5}, {"CHUNKS": 10}])
def test_output_in_many_chunks_leaves_room_for_a_fourth_stage(behind: dict[str, int]) -> None:
    defines = {"TILE_ROWS": 240, "CONSUMERS": 3, **behind}
    assert stages(defines) == 4
    assert stages({**defines, "CHUNKS": 1 if behind.get("OUT8", 0) else 2}) == 3


@pytest.mark.parametrize(
    ("tile", "defines", "layout"),
    [
        (240, {}, ((120, 64), 128, 120 * 128)),
        (184, {}, ((8, 64), 128, 96 * 128)),  # 23 groups of 8 rows have no halves
        (240, {"GEGLU": 1}, ((120, 32), 64, 120 * 64)),
        (176, {"OUT8": 1, "GELU": 1}, ((176, 64), 128, 88 * 128)),  # a line holds two rows of codes
        (240, {"OUT8": 1, "GEGLU": 1, "CHUNKS": 3}, ((80, 32), 64, 40 * 64)),
        (184, {"OUT8": 1, "CHUNKS": 5}, ((16, 64), 128, 24 * 128)),  # 12 pairs of groups of rows, no fifth of them
        (240, {"CHUNKS": 10}, ((24, 64), 128, 24 * 128)),
        (8, {}, ((8, 64), 128, 8 * 128)),
        (120, {"ROTARY": 1}, ((120, 32), 64, 2 * 120 * 64)),  # first halves of heads, then second ones
    ],
)
def test_output_is_staged_in_chunks_of_a_tile(
    tile: int, defines: dict[str, int], layout: tuple[tuple[int, int], int, int]
) -> None:
    assert OutLayout.of({"TILE_ROWS": tile, **defines}) == OutLayout(*layout)


@pytest.mark.parametrize("rows", [456, 712, 968, 1024])
@pytest.mark.parametrize("outputs", [512, 2560])
def test_a_slot_of_the_ring_takes_the_cosines_of_a_tile(rows: int, outputs: int) -> None:
    tile = tiling(rows, outputs, 1, H200, 2).rows
    assert tile <= 176  # for more there are no registers
    assert stages({"TILE_ROWS": tile, "CONSUMERS": 2, "ROTARY": 1}) >= 4


def sharing(x: int, weights: int, consumers: int = 2) -> Sharing:
    return Sharing.of({"SHARE_X": x, "SHARE_WEIGHTS": weights, "CONSUMERS": consumers})


@pytest.mark.parametrize("tile", range(8, 257, 8))
@pytest.mark.parametrize("sharers", range(1, 9))
def test_shares_cover_a_tile(tile: int, sharers: int) -> None:
    rows = sharing(sharers, 1).rows(tile)
    assert rows % 8 == 0
    assert rows <= tile <= sharers * rows
    assert sharers * (rows - 8) < tile  # the lowest that do
    assert sharing(1, sharers).groups(tile // 8) * 8 == rows


def test_blocks_that_share_take_one_tile_each() -> None:
    assert sharing(1, 1).blocks(4, 27, 1, H200) == 108
    assert sharing(1, 1).blocks(8, 34, 1, H200) == H200
    assert sharing(2, 1).blocks(4, 27, 1, H200) == 4 * 28  # a column tile more, which completes the last clusters
    assert sharing(2, 2).blocks(3, 9, 2, H200) == 4 * 10 * 2
    with pytest.raises(KernelError, match="136 tiles, of which 132 processors take one each"):
        sharing(2, 1).blocks(4, 34, 1, H200)


def test_sharing_that_the_kernel_has_no_code_for_is_refused() -> None:
    with pytest.raises(KernelError, match="SHARE_X 4 and SHARE_WEIGHTS 3 make no 1 to 8 blocks"):
        sharing(4, 3)
    with pytest.raises(KernelError, match="SHARE_X 0 and"):
        sharing(0, 1)
    with pytest.raises(KernelError, match="CONSUMERS must be 2"):
        sharing(2, 1, consumers=3)


@pytest.mark.parametrize(("size", "found"), [(1, 132), (2, 66), (4, 30), (8, 15)])
def test_clusters_at_once_are_what_an_h200_runs(size: int, found: int) -> None:
    assert clusters_at_once(size, 132) == found


@pytest.mark.parametrize(
    ("site", "rows", "outputs", "parts", "inputs", "expected"),
    [
        ("vision.qkv", 512, 3456, 1, 1152, Sharing(2, 2)),
        ("vision.down", 512, 1152, 3, 4352, Sharing(2, 2)),
        ("prefix.qkv", 712, 2560, 1, 2048, Sharing(2, 2)),
        ("prefix.output: 32 clusters of 4 do not fit", 712, 2048, 1, 2048, Sharing(2, 1)),
        ("vision.output: few bytes", 512, 1152, 1, 1152, Sharing(1, 1)),
        ("prefix.gate_up: many waves", 968, 32768, 1, 2048, Sharing(1, 1)),
        ("vision.up: three consumers", 512, 4304, 1, 1152, Sharing(1, 1)),
    ],
)
def test_blocks_share_where_that_fits_and_pays(
    site: str, rows: int, outputs: int, parts: int, inputs: int, expected: Sharing
) -> None:
    consumers = 2 if site == "prefix.qkv" else None  # which the rotation demands
    cut = tiling(rows, outputs, parts, 132, consumers)
    found = Sharing.best(cut, rows, outputs, parts, inputs, 132)
    assert found == expected
    row_tiles, column_tiles = -(-rows // cut.rows), -(-outputs // columns(cut.consumers))
    assert found.blocks(row_tiles, column_tiles, parts, 132) <= 132


@pytest.mark.parametrize(("divisor", "most"), [(1, 171), (2, 27), (3, 171), (7, 9), (11, 44), (45, 64), (641, 9000)])
def test_a_multiplication_divides_exactly(divisor: int, most: int) -> None:
    inverse = inverse_of_divisor(divisor, most)
    assert 0 <= inverse < 1 << 32
    for number in range(divisor * most):
        found = number if inverse == 0 else number * inverse >> 32
        assert found == number // divisor, number


@pytest.mark.parametrize(("divisor", "most"), [(65536, 1), (1 << 15, 4), (2, 1 << 30)])
def test_more_tiles_than_are_counted_exactly_are_refused(divisor: int, most: int) -> None:
    with pytest.raises(KernelError, match=f"{divisor} x {most} tiles are more than the kernel counts"):
        inverse_of_divisor(divisor, most)
