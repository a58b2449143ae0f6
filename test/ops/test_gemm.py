"""What of the Hopper matrix product needs no GPU: tiles, packing, memory, refusals."""

from __future__ import annotations

import pytest
import torch

from flashrt_ros.ops import ShapeError
from flashrt_ros.ops.cuda import gemm
from flashrt_ros.ops.cuda.errors import KernelError
from flashrt_ros.ops.cuda.gemm import Behind, OutLayout
from flashrt_ros.ops.cuda.tensor_map import tensor_map

H200 = 132
SHARED_LIMIT = 232448  # bytes that a block of a Hopper GPU may have


@pytest.mark.parametrize(("rows", "tile"), [(712, 240), (968, 248), (560, 192), (1, 8), (256, 256), (257, 136)])
def test_tiles_waste_few_rows(rows: int, tile: int) -> None:
    assert gemm.tile_rows(rows, 256, H200) == tile


@pytest.mark.parametrize("rows", range(1, 1100, 37))
def test_every_tile_is_one_that_the_instruction_has_and_fits(rows: int) -> None:
    tile = gemm.tile_rows(rows, 256, H200)
    assert tile % 8 == 0
    assert 8 <= tile <= 256
    assert gemm.shared_bytes(tile, 4, OutLayout.of(tile, {})) <= SHARED_LIMIT


@pytest.mark.parametrize(
    ("tile", "defines", "layout"),
    [
        (128, {}, ((64, 64), 128, 64 * 128)),
        (184, {}, ((8, 64), 128, 96 * 128)),  # 23 groups of 8 rows have no halves
        (240, {"GEGLU": 1}, ((120, 32), 64, 120 * 64)),
        (176, {"OUT8": 1, "GELU": 1}, ((176, 64), 128, 88 * 128)),  # a line holds two rows of codes
        (8, {}, ((8, 64), 128, 8 * 128)),
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
        message = f"product: no choice is called '{name}'; there are: TILE_ROWS, STAGES"
        with pytest.raises(KernelError, match=message):
            gemm.product(x, weight, out=whole, variant={name: 1})
    codes = torch.zeros(4 * 256 + 8, dtype=torch.uint8)[8:].view(gemm.CODES).view(4, 256)
    with pytest.raises(KernelError, match="product: 'out' must begin at a multiple of 16 bytes"):
        gemm.product(x, weight, out=codes, behind=Behind(out_scale=torch.ones(1)))
    with pytest.raises(ShapeError, match="inverse_rms_rows: 'out' dimension 0 'rows' must be 4"):
        gemm.inverse_rms_rows(x, eps=1e-6, out=torch.zeros(3))


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
