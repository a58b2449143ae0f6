"""The prefix's own attention of E4M3 codes: against float64 of what the codes stand for, poison, equal bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flashrt_ros.ops.attention import prefix_attention as reference
from flashrt_ros.ops.cuda import rows as kernels
from flashrt_ros.ops.cuda.head_codes import HeadCodes, arranged, keys_in_order, values_in_order
from flashrt_ros.ops.cuda.prefix_attention import prefix_attention_of_codes
from flashrt_ros.ops.cuda.rows import CODES, Quantiser
from flashrt_ros.precision.ops import coded_prefix_attention
from test.gpu.fused import DEVICE, distance
from test.gpu.replays import assert_replays_give_equal_bits
from test.gpu.test_prefix_attention import LENGTHS, framed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]
SUMS = 6e-3  # the tensor cores keep 14 bits of a sum, and the result is rounded to bfloat16
NAN = 0xFF
SCALES = torch.tensor([1 / 60, 1.3 / 60, 0.7 / 60])


def draw(rows: int, valid: int, *, poison: int = NAN, seed: int = 0) -> HeadCodes:
    """Codes of N(0, 1), behind the valid rows all of one code."""
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def codes(*shape: int) -> Tensor:
        return (torch.randn(*shape, device=DEVICE, generator=generator) * 60).to(CODES)

    query, key, value = codes(rows, 8, 256), codes(rows, 256), codes(rows, 256)
    key.view(torch.uint8)[valid:] = poison
    value.view(torch.uint8)[valid:] = poison
    made = arranged(query, key, value, SCALES.to(DEVICE))
    if poison:  # also where no row is
        order = torch.arange(len(made.value) * 64, device=DEVICE).view(-1, 1, 64).expand(made.value.shape)
        made.value.view(torch.uint8).masked_fill_(order >= valid, poison)
    return made


def values(codes: HeadCodes) -> tuple[Tensor, Tensor, Tensor]:
    """float64 that the codes stand for, in the order of rows; what is no number becomes zero."""
    rows = codes.query.shape[0]
    parts = codes.query, keys_in_order(codes.key, rows)[:, None], values_in_order(codes.value, rows)[:, None]
    query, key, value = (part.double().nan_to_num(0) * s for part, s in zip(parts, codes.scales.double(), strict=True))
    return query, key, value


def run(codes: HeadCodes, valid: int, out: Tensor | None = None, **options: Any) -> Tensor:
    if out is None:
        out = torch.full((codes.query.shape[0], 2048), float("nan"), device=DEVICE).bfloat16()
    prefix_attention_of_codes(codes, length(valid), out=out, **options)
    return out


def length(valid: int) -> Tensor:
    return torch.tensor([valid], dtype=torch.int32, device=DEVICE)


def exact(codes: HeadCodes, valid: int) -> Tensor:
    query, key, value = values(codes)
    out = torch.empty(query.shape[0], 2048, device=DEVICE, dtype=torch.float64)
    reference(query, key, value, length(valid), out=out)
    return out


@pytest.mark.parametrize(("rows", "valid"), LENGTHS)
def test_it_is_as_close_to_float64_as_the_reference_and_writes_nothing_else(rows: int, valid: int) -> None:
    codes = draw(rows, valid)
    truth, plain = exact(codes, valid), torch.empty(rows, 2048, device=DEVICE)
    query, key, value = (x.float() for x in values(codes))
    coded_prefix_attention(query, key, value, length(valid), scales=codes.scales, out=plain)
    out, front, behind = framed(rows)
    run(codes, valid, out)
    assert distance(out.double(), truth) < 1.25 * distance(plain.double(), truth) + SUMS
    assert (front == 0xA5).all()
    assert (behind == 0xA5).all()


@pytest.mark.parametrize("valid", [712, 130, 64, 33, 5])
def test_equal_scores_give_the_mean_of_values(valid: int) -> None:
    """Their weights are codes as they are: only sums are rounded."""
    codes = draw(712, valid)
    codes.query.view(torch.uint8).zero_()
    assert distance(run(codes, valid).double(), exact(codes, valid)) < SUMS


def test_each_head_row_and_column_is_in_its_place() -> None:
    """Each query finds one key that is far ahead of the others, so that its value comes back."""
    rows = 712
    codes = draw(rows, rows)
    at = torch.arange(rows, device=DEVICE)
    chosen = (at[:, None] * 37 + torch.arange(8, device=DEVICE) * 101) % rows
    codes.query.view(torch.uint8).copy_(keys_in_order(codes.key, rows).view(torch.uint8)[chosen])
    codes.scales[0] *= 8
    wanted = (values_in_order(codes.value, rows).float() * codes.scales[2])[chosen]
    got = run(codes, rows).view(rows, 8, 256).float()
    assert ((got - wanted).abs() <= 2**-7 * wanted.abs()).all()


@pytest.mark.parametrize("valid", [1, 33, 127, 500, 641])
def test_what_stands_behind_the_valid_rows_changes_no_bit(valid: int) -> None:
    outs = [run(draw(712, valid, poison=poison), valid) for poison in (0, NAN)]
    assert outs[1].isfinite().all()
    assert torch.equal(*outs)


def test_replays_give_equal_bits_with_and_without_overlap() -> None:
    lengths = (712, 526, 65, 600)
    cases = [draw(712, valid, seed=valid) for valid in lengths]
    outs = torch.empty(4, 712, 2048, device=DEVICE, dtype=torch.bfloat16)
    counts = [length(valid) for valid in lengths]

    def body(overlap: bool) -> None:
        for codes, count, out in zip(cases, counts, outs, strict=True):
            prefix_attention_of_codes(codes, count, out=out, overlap=overlap)

    assert_replays_give_equal_bits(body, outs)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("rows", "valid"), [(712, 526), (968, 968), (13, 9)])
def test_codes_are_those_of_the_rounded_result(rows: int, valid: int, overlap: bool) -> None:
    codes = draw(rows, valid)
    plain = run(codes, valid)
    quantiser = Quantiser(torch.tensor([float(plain.abs().amax()) / 448 / 2], device=DEVICE))  # some values saturate
    wanted = torch.empty(rows, 2048, device=DEVICE, dtype=CODES)
    kernels.quantise(plain, quantiser, out=wanted)
    out, front, behind = framed(rows, CODES)
    run(codes, valid, out, quantiser=quantiser, overlap=overlap)
    assert torch.equal(out.view(torch.uint8), wanted.view(torch.uint8))
    assert (front == 0xA5).all()
    assert (behind == 0xA5).all()
