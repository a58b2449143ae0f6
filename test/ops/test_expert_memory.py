"""How the shared memory of the expert's blocks is laid out, and the memory between its launches."""

from __future__ import annotations

import pytest
import torch

from flashrt_ros.ops.cuda.errors import KernelError
from flashrt_ros.ops.cuda.expert import (
    ExpertScratch,
    kernel_sizes,
    keys_of_a_block,
    phases_per_layer,
    shared_layout,
)

LIMIT = 232448  # bytes of shared memory of a Hopper block


@pytest.mark.parametrize(("rows", "capacity"), [(1, 40), (10, 712), (10, 968), (15, 712), (16, 712), (50, 968)])
def test_shared_memory_of_a_hopper_block_is_used_but_not_exceeded(rows: int, capacity: int) -> None:
    stages, nbytes = shared_layout(rows, keys_of_a_block(capacity, rows), 15, LIMIT)
    assert stages >= 4
    assert LIMIT - 8208 < nbytes <= LIMIT


@pytest.mark.parametrize(("rows", "capacity"), [(1, 40), (10, 712), (30, 712), (50, 968)])
def test_a_ring_of_narrow_stages_is_deeper(rows: int, capacity: int) -> None:
    sizes = {
        bits: kernel_sizes(bits, rows, capacity, 15, LIMIT)
        for bits in ((16, 16, 16, 16), (8, 8, 8, 8), (4, 4, 4, 4), (4, 8, 4, 4), (4, 4, 4, 16))
    }
    wide, eight, four, mixed, one_wide = sizes.values()
    assert all(LIMIT - 8208 < each["SHARED_BYTES"] <= LIMIT for each in sizes.values())
    assert eight["STAGES"] >= 2 * wide["STAGES"]
    assert four["STAGES"] >= 3.5 * wide["STAGES"] - 1  # what lies behind the ring begins at a multiple of 1024 bytes
    assert mixed["STAGES"] == eight["STAGES"]
    assert one_wide["STAGES"] == wide["STAGES"]
    assert one_wide["DOWN_BITS"] == 16


@pytest.mark.parametrize(
    ("capacity", "rows", "keys"),
    [
        (1, 1, 32), (118, 10, 32), (246, 10, 32), (247, 10, 64), (502, 10, 64), (503, 10, 96), (712, 10, 96),
        (758, 10, 96), (759, 10, 128), (968, 10, 128), (968, 50, 128), (1023, 1, 128), (960, 64, 128),
    ],
)  # fmt: skip
def test_a_block_has_room_for_an_eighth_of_the_keys(capacity: int, rows: int, keys: int) -> None:
    assert keys_of_a_block(capacity, rows) == keys


def test_no_prefix_has_more_keys_than_room() -> None:
    """A block takes whole tiles of eight keys; room comes in groups of four tiles, and the kernel has 128 at most."""
    for total in range(2, 1025):
        room, taken = keys_of_a_block(total - 1, 1), 8 * -(-total // 64)
        assert taken <= room < taken + 32
        assert room % 32 == 0
        assert room <= 128


def test_too_little_shared_memory_is_refused() -> None:
    with pytest.raises(KernelError, match="10 rows and 96 keys .* bytes of shared memory a block, there are 101376"):
        shared_layout(10, 96, 15, 101376)


@pytest.mark.parametrize(("rows", "shares"), [(1, 4096), (10, 4096), (16, 4096), (17, 0), (50, 0)])
def test_sums_of_shares_begin_at_zero_and_all_else_is_unwritten(rows: int, shares: int) -> None:
    scratch = ExpertScratch.allocate(rows, torch.device("cpu"))
    rest = 2 * 1024 + 4 * 1024 + 2048 + 2 * 256 + 2048 + (0 if shares else 4096)
    assert len(scratch.words) == rows * (rest + shares)
    assert bool((scratch.words[: rows * rest] == -1).all())
    assert not scratch.words[rows * rest :].any()
    assert not scratch.sync.any()


def test_few_rows_have_a_phase_less() -> None:
    assert [phases_per_layer(rows) for rows in (1, 16, 17, 64)] == [4, 4, 5, 5]
