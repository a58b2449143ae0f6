"""What the kernel of image attention needs is checked before anything is launched; so no GPU is needed here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flashrt_ros.ops import ShapeError
from flashrt_ros.ops.cuda.errors import KernelError
from flashrt_ros.ops.cuda.image_attention import (
    box_rows,
    image_attention,
    image_attention_source,
    key_blocks,
    shared_bytes,
    spreading_bytes,
    wgmma_source,
)
from flashrt_ros.ops.cuda.rows import CODES, Quantiser

IMAGES, HEADS, TOKENS, HEAD_DIM = 2, 3, 64, 24
ROWS, WIDTH = IMAGES * TOKENS, HEADS * HEAD_DIM
SIZES = (
    ".cu takes images of a multiple of 64 tokens up to 256 and heads of an odd multiple of 8 from 24 to 120, found {}"
)
SHARED_LIMIT = 232448  # bytes that a block of a Hopper GPU may have


def bf16(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.bfloat16)


def call(**changed: Any) -> None:
    arguments = {"images": IMAGES, "heads": HEADS, "out": bf16(ROWS, WIDTH), "qkv": bf16(ROWS, 3 * WIDTH), **changed}
    image_attention(arguments.pop("qkv"), **arguments)


def codes() -> Tensor:
    return bf16(ROWS, WIDTH).to(CODES)


@pytest.mark.parametrize("quantised", [False, True])
def test_what_is_as_it_must_be_gets_as_far_as_the_gpu(quantised: bool) -> None:
    changed = {"out": codes(), "quantiser": Quantiser(torch.ones(1))} if quantised else {}
    with pytest.raises((ValueError, AssertionError, RuntimeError), match=r"(?i)cuda") as caught:
        call(**changed)
    assert not isinstance(caught.value, KernelError | ShapeError)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"images": 0}, "'images' must divide the 128 rows of 'out', got 0"),
        ({"images": 3}, "'images' must divide the 128 rows of 'out', got 3"),
        ({"images": 4}, SIZES.format("32 and 24; use scaled")),
        ({"images": 1, "out": bf16(320, WIDTH), "qkv": bf16(320, 3 * WIDTH)}, SIZES.format("320 and 24")),
        ({"out": bf16(0, WIDTH), "qkv": bf16(0, 3 * WIDTH)}, SIZES.format("0 and 24")),
        ({"heads": 0}, "'heads' must divide the 72 columns of 'out', got 0"),
        ({"heads": 5}, "'heads' must divide the 72 columns of 'out', got 5"),
        ({"heads": 9}, SIZES.format("64 and 8")),
        ({"out": bf16(ROWS, 128), "qkv": bf16(ROWS, 384), "heads": 2}, SIZES.format("64 and 64")),
        ({"out": bf16(ROWS, 136), "qkv": bf16(ROWS, 408), "heads": 1}, SIZES.format("64 and 136")),
        ({"qkv": bf16(ROWS, 2 * WIDTH)}, "'qkv' dimension 1 must be 216"),
        ({"qkv": bf16(ROWS + 1, 3 * WIDTH)}, "'qkv' dimension 0 'rows' must be 128"),
        ({"out": bf16(IMAGES, TOKENS, WIDTH)}, "'out' needs 2 dimensions"),
        ({"out": codes(), "quantiser": Quantiser(torch.ones(2))}, "'scale' dimension 0 must be 1"),
    ],
)  # fmt: skip
def test_sizes_that_the_kernel_does_not_have_are_refused_by_name(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=f"^image_attention(: )?{message}"):
        call(**changed)


def shifted(tensor: Tensor) -> Tensor:
    """Dense, but not from a multiple of 16 bytes on."""
    return torch.cat((tensor.flatten()[:1], tensor.flatten()))[1:].view(tensor.shape)


@pytest.mark.parametrize("name", ["qkv", "out"])
@pytest.mark.parametrize(
    "spoil",
    [
        shifted,
        lambda tensor: tensor.float(),
        lambda tensor: tensor[:1].expand(tensor.shape),
        lambda tensor: torch.cat((tensor, tensor), -1)[:, : tensor.shape[1]],
    ],
)
def test_memory_that_the_kernel_would_read_wrongly_is_refused_by_name(
    name: str, spoil: Callable[[Tensor], Tensor]
) -> None:
    tensor = bf16(ROWS, WIDTH if name == "out" else 3 * WIDTH)
    with pytest.raises(KernelError, match=f"^image_attention: '{name}' must "):
        call(**{name: spoil(tensor)})


def test_codes_and_their_scale_are_checked() -> None:
    with pytest.raises(KernelError, match="'out' must be float8_e4m3fn"):
        call(quantiser=Quantiser(torch.ones(1)))
    with pytest.raises(KernelError, match="'out' must be bfloat16"):
        call(out=codes())
    with pytest.raises(KernelError, match="'scale' must be float32"):
        call(out=codes(), quantiser=Quantiser(torch.ones(1).double()))
    with pytest.raises(KernelError, match="'quantiser' must have no multiplier"):
        call(out=codes(), quantiser=Quantiser(torch.ones(1), torch.ones(WIDTH)))


def test_tensors_elsewhere_are_refused() -> None:
    with pytest.raises(KernelError, match="image_attention: 'out' is on 'meta', the kernel runs on 'cpu'"):
        call(out=bf16(ROWS, WIDTH).to("meta"))


@pytest.mark.parametrize("tokens", [64, 128, 192, 256])
@pytest.mark.parametrize("head_dim", range(24, 121, 16))
@pytest.mark.parametrize("chosen", [{}, {"CLUSTER": 1}], ids=str)
def test_every_size_fits_a_block(tokens: int, head_dim: int, chosen: dict[str, int]) -> None:
    source = image_attention_source(tokens, 2, head_dim, chosen)
    assert chosen.items() <= source.defines.items()
    assert source.defines["SHARED_BYTES"] <= SHARED_LIMIT
    rows = box_rows(tokens, source.defines["CLUSTER"])
    assert 64 % rows == 0  # queries are whole boxes
    assert tokens // 4 // source.defines["CLUSTER"] % rows == 0
    assert rows * head_dim * 2 % 128 == 0  # where the engine may write


@pytest.mark.parametrize("tokens", [64, 128, 192, 256])
@pytest.mark.parametrize("head_dim", range(24, 121, 16))
@pytest.mark.parametrize("chosen", [{}, {"KEY_LINE": 64, "VALUE_LINE": 128}, {"WARPGROUPS": 1}], ids=str)
def test_every_size_fits_a_block_of_warpgroups(tokens: int, head_dim: int, chosen: dict[str, int]) -> None:
    source = wgmma_source(tokens, 2, head_dim, chosen)
    assert chosen.items() <= source.defines.items()
    assert source.defines["SHARED_BYTES"] <= SHARED_LIMIT


@pytest.mark.parametrize(
    ("head_dim", "key_line", "blocks"),
    [
        (72, 128, ((128, 1), (32, 1))),
        (72, 64, ((64, 3),)),
        (24, 128, ((64, 1),)),
        (40, 128, ((128, 1),)),
        (88, 128, ((128, 1), (64, 1))),
        (120, 128, ((128, 1), (128, 1))),
    ],
)
def test_keys_lie_in_blocks_of_whole_lines(head_dim: int, key_line: int, blocks: tuple[tuple[int, int], ...]) -> None:
    assert key_blocks(head_dim, key_line) == blocks


def test_a_choice_that_no_kernel_has_is_refused() -> None:
    with pytest.raises(KernelError, match="image_attention: no choice is called 'SPLIT'"):
        call(variant={"SPLIT": 2})
    with pytest.raises(KernelError, match="image_attention: no choice is called 'KEY_LINE'"):
        call(variant={"WARPGROUPS": 0, "KEY_LINE": 64})


RESERVED = 1024  # of a block, for the system


def test_two_blocks_of_siglip_share_a_multiprocessor() -> None:
    assert 2 * (shared_bytes(256, 72) + RESERVED) <= 228 * 1024
    assert 2 * (wgmma_source(256, 16, 72, {}).defines["SHARED_BYTES"] + RESERVED) <= 228 * 1024


@pytest.mark.parametrize(
    ("blocks", "together"), [(1, 1), (64, 1), (128, 1), (132, 1), (133, 2), (192, 2), (264, 2), (265, 3)]
)
def test_blocks_that_begin_early_spread_over_all_multiprocessors(blocks: int, together: int) -> None:
    shared = 228 * 1024
    nbytes = spreading_bytes(blocks, 132, shared)
    assert together * (nbytes + RESERVED) <= shared < (together + 1) * (nbytes + RESERVED)
