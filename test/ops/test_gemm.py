"""What of the Hopper matrix product needs no GPU: tiles, packing, memory, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashrt_ros.ops import ShapeError
from flashrt_ros.ops.cuda import gemm
from flashrt_ros.ops.cuda.errors import KernelError
from flashrt_ros.ops.cuda.gemm import Behind, Heads, OutLayout
from flashrt_ros.ops.cuda.tensor_map import grouped_map, tensor_map

H200 = 132
SHARED_LIMIT = 232448  # bytes that a block of a Hopper GPU may have


@pytest.mark.parametrize(("rows", "tile"), [(712, 240), (968, 248), (560, 192), (1, 8), (256, 256), (257, 136)])
def test_tiles_waste_few_rows(rows: int, tile: int) -> None:
    assert gemm.tile_rows(rows, 256, H200) == tile


def test_few_outputs_get_lower_tiles() -> None:
    """Vision's output: 9 tiles of outputs, so that 8 tiles of rows fill more multiprocessors than 7."""
    assert gemm.tile_rows(512, 9, H200) == 64


@pytest.mark.parametrize("rows", range(1, 1100, 37))
def test_every_tile_is_one_that_the_instruction_has_and_fits(rows: int) -> None:
    tile = gemm.tile_rows(rows, 256, H200)
    assert tile % 8 == 0
    assert 8 <= tile <= 256
    assert gemm.shared_bytes(tile, 4, OutLayout.of(tile, {}), {}) <= SHARED_LIMIT


@pytest.mark.parametrize(("rows", "outputs", "tile"), [(512, 4352, 104), (256, 4352, 56), (768, 4352, 160)])
def test_three_consumers_take_lower_tiles(rows: int, outputs: int, tile: int) -> None:
    assert gemm.tile_rows(rows, -(-outputs // 192), H200, 3) == tile
    assert gemm.tile_rows(1000, 256, H200, 3) <= 192


@pytest.mark.parametrize("geglu", [0, 1])
@pytest.mark.parametrize("tile", [8, 104, 192])
def test_three_consumers_share_the_memory_of_a_block(tile: int, geglu: int) -> None:
    defines = {"CONSUMERS": 3, "OUT8": 1, "GEGLU": geglu}
    layout = OutLayout.of(tile, defines)
    ring = gemm.stages(tile, layout, defines)
    bytes_of_stage, bytes_of_consumer = (192 + tile) * 128, layout.nbytes + 4 * tile
    assert gemm.shared_bytes(tile, ring, layout, defines) == ring * (bytes_of_stage + 16) + 3 * bytes_of_consumer
    assert gemm.shared_bytes(tile, ring, layout, defines) <= SHARED_LIMIT
    assert ring >= 3


@pytest.mark.parametrize(
    ("tile", "defines", "layout"),
    [
        (128, {}, ((64, 64), 128, 64 * 128)),
        (184, {}, ((8, 64), 128, 96 * 128)),  # 23 groups of 8 rows have no halves
        (240, {"GEGLU": 1}, ((120, 32), 64, 120 * 64)),
        (176, {"OUT8": 1, "GELU": 1}, ((176, 64), 128, 88 * 128)),  # a line holds two rows of codes
        (8, {}, ((8, 64), 128, 8 * 128)),
        (120, {"ROTARY": 1}, ((120, 32), 64, 2 * 120 * 64)),  # first halves of heads, then second ones
    ],
)
def test_output_is_staged_in_halves_of_a_tile(
    tile: int, defines: dict[str, int], layout: tuple[tuple[int, int], int, int]
) -> None:
    assert OutLayout.of(tile, defines) == OutLayout(*layout)


@pytest.mark.parametrize(
    ("capability", "reason"), [((9, 0), ""), ((8, 9), "this GPU is sm_89"), ((12, 0), "this GPU is sm_120a")]
)
def test_only_hopper_is_suited(capability: tuple[int, int], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert reason in gemm.unsuited(torch.device("cuda", 0))
    assert bool(gemm.unsuited(torch.device("cuda", 0))) == bool(reason)


def test_wrong_arguments_are_named() -> None:
    x, weight, out = (torch.zeros(*shape, dtype=torch.bfloat16) for shape in ((4, 64), (256, 64), (4, 128)))
    with pytest.raises(ShapeError, match=r"gate_up_geglu: 'weight' dimension 0 must be 240"):
        gemm.gate_up_geglu(x, weight, out=out[:, :120])
    with pytest.raises(ShapeError, match="gate_up_geglu: 'scale' dimension 0 must be 4"):
        gemm.gate_up_geglu(x, weight, out=out, behind=Behind(scale=torch.ones(5)))
    with pytest.raises(KernelError, match="gate_up_geglu: 'scale' must be torch.float32"):
        gemm.gate_up_geglu(x, weight, out=out, behind=Behind(scale=torch.ones(4).bfloat16()))
    with pytest.raises(KernelError, match="product: 'weight' must be torch.bfloat16"):
        gemm.product(x, weight.float(), out=torch.zeros(4, 256, dtype=torch.bfloat16))
    bias = torch.zeros(256, dtype=torch.bfloat16, device="meta")
    with pytest.raises(KernelError, match="product: 'bias' is on 'meta', the kernel runs on 'cpu'"):
        gemm.product(x, weight, out=torch.zeros(4, 256, dtype=torch.bfloat16), behind=Behind(bias=bias))
    whole = torch.zeros(4, 256, dtype=torch.bfloat16)
    for name in ("GEGLU", "CLUSTER"):
        message = f"product: no choice is called '{name}'; there are: TILE_ROWS, STAGES, CONSUMERS"
        with pytest.raises(KernelError, match=message):
            gemm.product(x, weight, out=whole, variant={name: 1})
    with pytest.raises(KernelError, match=r"product: CONSUMERS must be one of \(2, 3\), got 4"):
        gemm.product(x, weight, out=whole, variant={"CONSUMERS": 4})
    codes = torch.zeros(4 * 256 + 8, dtype=torch.uint8)[8:].view(gemm.CODES).view(4, 256)
    with pytest.raises(KernelError, match="product: 'out' must begin at a multiple of 16 bytes"):
        gemm.product(x, weight, out=codes, behind=Behind(out_scale=torch.ones(1)))
    with pytest.raises(ShapeError, match="inverse_rms_rows: 'out' dimension 0 'rows' must be 4"):
        gemm.inverse_rms_rows(x, eps=1e-6, out=torch.zeros(3))


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


def heads(rows: int, queries: int = 8) -> Heads:
    query = zeros(rows, 2560)[:, :2048].view(rows, 8, 256) if queries else None
    return Heads(zeros(rows, 256), query, zeros(rows, 1, 256), zeros(rows, 1, 256))


def test_wrong_arguments_of_a_rotated_product_are_named() -> None:
    x, packed, key_value, right = zeros(4, 64), zeros(2560, 64), zeros(512, 64), heads(4)
    with pytest.raises(ShapeError, match="rotated_qkv: 'weight' dimension 0 must be 2560"):
        gemm.rotated_qkv(x, key_value, right)
    with pytest.raises(ShapeError, match="rotated_qkv: 'weight' dimension 0 must be 512"):
        gemm.rotated_qkv(x, packed, heads(4, queries=0))
    with pytest.raises(ShapeError, match="rotated_qkv: 'key' dimension 0 'rows' must be 4"):
        gemm.rotated_qkv(x, packed, replace(right, key=zeros(5, 1, 256)))
    with pytest.raises(KernelError, match="rotated_qkv: 'rope' must be bfloat16"):
        gemm.rotated_qkv(x, packed, replace(right, rope=torch.zeros(4, 256)))
    with pytest.raises(KernelError, match="rotated_qkv: 'value' must be bfloat16 with contiguous rows"):
        gemm.rotated_qkv(x, packed, replace(right, value=zeros(4, 1, 512)[..., :256]))
    with pytest.raises(KernelError, match="rotated_qkv: 'query' is on 'meta', the kernel runs on 'cpu'"):
        gemm.rotated_qkv(x, packed, replace(right, query=torch.empty(4, 8, 256, dtype=torch.bfloat16, device="meta")))
    for behind in (Behind(gelu=True), Behind(scale=torch.ones(4)), Behind(out_scale=torch.ones(1))):
        with pytest.raises(KernelError, match="rotated_qkv: nothing of 'behind' but a factor and a bias"):
            gemm.rotated_qkv(x, packed, right, behind=behind)
    with pytest.raises(KernelError, match="rotated_qkv: CONSUMERS must be 2"):
        gemm.rotated_qkv(x, packed, right, variant={"CONSUMERS": 3})


@pytest.mark.parametrize("rows", [456, 712, 968, 1024])
@pytest.mark.parametrize("outputs", [512, 2560])
def test_a_slot_of_the_ring_takes_the_cosines_of_a_tile(rows: int, outputs: int) -> None:
    tile = gemm.tile_rows(rows, outputs // 128, H200)
    layout = OutLayout.of(tile, {"ROTARY": 1})
    ring = gemm.stages(tile, layout, {"ROTARY": 1})
    assert tile <= 176  # for more there are no registers
    assert ring >= 4
    assert gemm.shared_bytes(tile, ring, layout, {"ROTARY": 1}) <= SHARED_LIMIT


@pytest.mark.parametrize("apart", [12, 64, -8])
def test_groups_that_are_not_in_the_matrix_are_refused(apart: int) -> None:
    with pytest.raises(KernelError, match=f"tensor map: 64 rows make no groups of 8 rows, {apart} apart"):
        grouped_map(zeros(64, 64), 8, 64, apart=apart)


@pytest.mark.parametrize("parts", [1, 2])
def test_parts_without_room_for_whole_tiles_are_refused(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the copy engine would leave out what has no room."""
    monkeypatch.setattr(gemm, "unsuited", lambda _: "")
    monkeypatch.setattr(gemm, "_processors", lambda _: 132)
    x, weight, out = (torch.zeros(*s, dtype=torch.bfloat16) for s in ((712, 128), (256, 128), (parts, 5, 256)))
    with pytest.raises(ShapeError, match="product: each part needs 7.. rows of 'out', got 5"):
        gemm.product(x, weight, out=out)


@pytest.mark.parametrize(
    ("matrix", "box", "message"),
    [
        (torch.zeros(8, 20, dtype=torch.bfloat16), (8, 8), r"multiples of 16 bytes, got strides \(20, 1\)"),
        (torch.zeros(8, 16, dtype=torch.bfloat16)[:, 1:9], (8, 8), "multiples of 16 bytes"),
        (torch.zeros(8, 16, dtype=torch.bfloat16).t(), (8, 8), "rows must be contiguous"),
        (torch.zeros(8, 16, dtype=torch.bfloat16), (257, 8), "1 to 256 rows and columns"),
    ],
)
def test_what_the_copy_engine_cannot_address_is_refused(
    matrix: torch.Tensor, box: tuple[int, int], message: str
) -> None:
    with pytest.raises(KernelError, match=message):
        tensor_map(matrix, box, 0)
