"""What of the Hopper matrix product needs no GPU: refusals, memory for parts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashrt_ros.ops import ShapeError
from flashrt_ros.ops.cuda import gemm
from flashrt_ros.ops.cuda.errors import KernelError
from flashrt_ros.ops.cuda.gemm import Behind, Heads
from flashrt_ros.ops.cuda.tensor_map import grouped_map, tensor_map

H200 = 132


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
        message = f"product: no choice is called '{name}'; there are: TILE_ROWS, STAGES, CONSUMERS, CHUNKS, SHARE_X"
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


@pytest.mark.parametrize("apart", [12, 64, -8])
def test_groups_that_are_not_in_the_matrix_are_refused(apart: int) -> None:
    with pytest.raises(KernelError, match=f"tensor map: 64 rows make no groups of 8 rows, {apart} apart"):
        grouped_map(zeros(64, 64), 8, 64, apart=apart)


@pytest.mark.parametrize("parts", [1, 2])
def test_parts_without_room_for_whole_tiles_are_refused(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the copy engine would leave out what has no room."""
    monkeypatch.setattr(gemm, "unsuited", lambda _: "")
    monkeypatch.setattr(gemm, "_processors", lambda _: H200)
    x, weight, out = (torch.zeros(*s, dtype=torch.bfloat16) for s in ((712, 128), (256, 128), (parts, 5, 256)))
    with pytest.raises(ShapeError, match="product: each part needs 7.. rows of 'out', got 5"):
        gemm.product(x, weight, out=out)


@pytest.mark.parametrize(
    ("parts", "variant", "padded"),
    [(4, {}, 720), (3, {}, 736), (4, {"CONSUMERS": 2}, 736), (4, {"TILE_ROWS": 248}, 744), (4, {"STAGES": 3}, 720)],
)
def test_parts_need_whole_tiles(
    parts: int, variant: dict[str, int], padded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemm, "_processors", lambda _: H200)
    assert gemm.parts_rows(712, 2048, parts, torch.device("cuda", 0), variant) == padded


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
