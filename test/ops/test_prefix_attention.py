"""What of the prefix's own attention needs no GPU: memory, grid, refusals."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashrt_ros.ops import ShapeError
from flashrt_ros.ops.cuda.compiler import full_text
from flashrt_ros.ops.cuda.errors import KernelError
from flashrt_ros.ops.cuda.head_codes import HeadCodes
from flashrt_ros.ops.cuda.prefix_attention import (
    blocks,
    prefix_attention,
    prefix_attention_of_codes,
    prefix_attention_source,
    shared_bytes,
    unsuited,
)
from flashrt_ros.ops.cuda.rows import CODES, Quantiser

SHARED_LIMIT = 232448  # bytes that a block of a Hopper GPU may have
ROWS = 24


def bf16(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


def arguments(**other: Any) -> dict[str, Any]:
    usual = {
        "query": bf16(ROWS, 2560)[:, :2048].view(ROWS, 8, 256), "key": bf16(ROWS, 1, 256), "value": bf16(ROWS, 1, 256),
        "valid": torch.ones(1, dtype=torch.int32), "out": bf16(ROWS, 2048),
    }  # fmt: skip
    return {**usual, **other}


@pytest.mark.parametrize(("rows", "count"), [(712, 90), (968, 122), (1, 2), (16, 2), (17, 4)])
def test_the_grid_is_whole_clusters(rows: int, count: int) -> None:
    assert blocks(rows) == count


@pytest.mark.parametrize("fp8", [0, 1])
def test_shared_memory_fits_a_hopper_block(fp8: int) -> None:
    assert shared_bytes(prefix_attention_source({"FP8": fp8})) <= SHARED_LIMIT


@pytest.mark.parametrize("fp8", [0, 1])
def test_launcher_and_kernel_agree_on_the_sizes(fp8: int) -> None:
    """The offsets that the kernel computes, from its own constants, end where the launcher's memory ends."""
    source = prefix_attention_source({"FP8": fp8})
    text = full_text(source)
    found = dict(re.findall(r"\b(k[A-Z]\w+) = (\d+)\b", text))
    heads, width, rows, line = (int(found[name]) for name in ("kHeads", "kHeadDim", "kBlockRows", "kLineBytes"))
    usual = {name: int(value) for name, value in re.findall(r"#define (TILE_ROWS|\w+_BUFFERS) (\d+)", text)}
    used = {name: source.defines[name] for name in usual}
    assert fp8 or used == usual
    tile, keys, values = used["TILE_ROWS"], used["KEY_BUFFERS"], used["VALUE_BUFFERS"]
    row_bytes, product_rows = width * (2 - fp8), heads * rows
    pieces = row_bytes // line
    barriers = (pieces * keys + values) + 2 * (keys + values) + 2 * pieces + 2
    bytes_of_tiles = (keys + values) * tile * row_bytes
    assert shared_bytes(source) == 2 * product_rows * row_bytes + bytes_of_tiles + product_rows * 8 + 8 * barriers


@pytest.mark.parametrize(
    ("capability", "reason"), [((9, 0), ""), ((8, 9), "this GPU is sm_89"), ((12, 0), "this GPU is sm_120a")]
)
def test_only_hopper_is_suited(capability: tuple[int, int], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert reason in unsuited(torch.device("cuda", 0))
    assert bool(unsuited(torch.device("cuda", 0))) == bool(reason)


def test_a_choice_that_the_kernel_does_not_have_is_refused() -> None:
    with pytest.raises(KernelError, match="prefix_attention: no choice is called 'CLUSTER'; there are: TILE_ROWS"):
        prefix_attention(**arguments(variant={"CLUSTER": 2}))


def test_tensors_of_the_cpu_are_refused_after_all_else() -> None:
    with pytest.raises(KernelError, match="prefix_attention.cu runs on a GPU, the tensors are on 'cpu'"):
        prefix_attention(**arguments())
    with pytest.raises(KernelError, match="runs on a GPU"):
        prefix_attention(
            **arguments(out=torch.zeros(ROWS, 2048, dtype=CODES), quantiser=Quantiser(torch.ones(1))), overlap=True
        )


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"query": bf16(ROWS, 4, 256)}, "'query' dimension 1 must be 8"),
        ({"query": bf16(ROWS, 8, 128)}, "'query' dimension 2 must be 256"),
        ({"key": bf16(ROWS, 2, 256)}, "'key' dimension 1 must be 1"),
        ({"value": bf16(ROWS + 1, 1, 256)}, "'value' dimension 0 'rows' must be 24"),
        ({"valid": torch.ones(2, dtype=torch.int32)}, "'valid' dimension 0 must be 1"),
        ({"out": bf16(ROWS, 8, 256)}, "'out' needs 2 dimensions"),
        ({"quantiser": Quantiser(torch.ones(2))}, "'scale' dimension 0 must be 1"),
    ],
)
def test_wrong_shapes_are_named(other: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=f"prefix_attention: {message}"):
        prefix_attention(**arguments(**other))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"query": bf16(ROWS, 8, 256).float()}, "'query' must be bfloat16"),
        ({"query": bf16(8, ROWS, 256).transpose(0, 1)}, "'query' must be bfloat16 with contiguous rows"),
        ({"query": bf16(1, 8, 256).expand(ROWS, 8, 256)}, "rows at least 2048 values apart, by multiples of 8, got 0"),
        ({"query": bf16(ROWS, 2052)[:, :2048].view(ROWS, 8, 256)}, "by multiples of 8, got 2052"),
        ({"query": bf16(ROWS, 2056)[:, 1:2049].view(ROWS, 8, 256)}, "'query' must begin at a multiple of 16 bytes"),
        ({"key": bf16(ROWS, 2, 256)[:, :1]}, "'key' must be bfloat16 with contiguous rows one behind the other"),
        ({"value": bf16(ROWS, 1, 256).half()}, "'value' must be bfloat16"),
        ({"valid": torch.ones(1, dtype=torch.int64)}, "'valid' must be int32"),
        ({"out": torch.zeros(ROWS, 2048)}, "'out' must be bfloat16"),
        ({"out": bf16(ROWS, 2560)[:, :2048]}, "'out' must be bfloat16 with contiguous rows"),
        ({"quantiser": Quantiser(torch.ones(1))}, "'out' must be float8_e4m3fn"),
        ({"quantiser": Quantiser(torch.ones(1), torch.ones(2048))}, "'quantiser' must have no multiplier"),
        ({"quantiser": Quantiser(torch.ones(1).double())}, "'scale' must be float32"),
        ({"valid": torch.ones(1, dtype=torch.int32, device="meta")}, "'valid' is on 'meta', the kernel runs on 'cpu'"),
        ({"out": bf16(ROWS, 2048).to("meta")}, "'out' is on 'meta'"),
    ],
)
def test_memory_that_the_kernel_would_read_wrongly_is_refused(other: dict[str, Any], message: str) -> None:
    with pytest.raises(KernelError, match=f"prefix_attention: .*{message}"):
        prefix_attention(**arguments(**other))


# -- codes -------------------------------------------------------------------------------------------------------------


def of_codes(codes: HeadCodes, **other: Any) -> None:
    usual = {"valid": torch.ones(1, dtype=torch.int32), "out": bf16(ROWS, 2048)}
    prefix_attention_of_codes(codes, **{**usual, **other})


def test_codes_on_the_cpu_are_refused_after_all_else() -> None:
    with pytest.raises(KernelError, match="prefix_attention.cu runs on a GPU, the tensors are on 'cpu'"):
        of_codes(HeadCodes.allocate(ROWS, torch.ones(3)))


def test_codes_of_other_shapes_and_types_are_named() -> None:
    made = HeadCodes.allocate(ROWS, torch.ones(3))
    with pytest.raises(ShapeError, match="prefix_attention: 'key_codes' dimension 0 must be 32"):
        of_codes(replace(made, key=made.key[:ROWS]))
    with pytest.raises(ShapeError, match="prefix_attention: 'value_codes' needs 3 dimensions"):
        of_codes(replace(made, value=made.value.flatten(0, 1)))
    with pytest.raises(ShapeError, match="prefix_attention: 'scales' dimension 0 must be 3"):
        of_codes(replace(made, scales=torch.ones(1)))
    with pytest.raises(KernelError, match="'query_codes' must be float8_e4m3fn"):
        of_codes(replace(made, query=made.query.view(torch.uint8)))
    with pytest.raises(KernelError, match="'value_codes' is on 'meta'"):
        of_codes(replace(made, value=made.value.to("meta")))
    with pytest.raises(KernelError, match="'out' must be float8_e4m3fn"):
        of_codes(made, quantiser=Quantiser(torch.ones(1)))
