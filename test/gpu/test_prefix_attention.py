"""The prefix's own attention against the reference in float64: lengths at the edges of tiles, poison, equal bits."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from flashrt_ros.ops.attention import prefix_attention as reference
from flashrt_ros.ops.cuda import rows as kernels
from flashrt_ros.ops.cuda.prefix_attention import prefix_attention
from flashrt_ros.ops.cuda.rows import CODES, Quantiser
from test.gpu.fused import DEVICE, distance
from test.gpu.replays import assert_replays_give_equal_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]
BOUND = 4e-3  # one rounding to bfloat16 is 1.7e-3 of a random vector; weights are rounded too
LENGTHS = [
    (712, 712), (712, 526), (712, 1), (712, 31), (712, 32), (712, 64), (712, 65), (712, 128), (712, 129), (712, 256),
    (712, 257), (968, 968), (968, 526), (968, 800), (8, 8), (8, 3), (1, 1), (13, 13), (130, 130), (1200, 1199),
    (712, 79), (712, 80), (712, 81), (712, 160), (712, 161), (16, 16), (17, 17),
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Operands as a layer has them: query inside the wider product, key and value at the front of a cache."""

    query: Tensor
    key: Tensor
    value: Tensor
    valid: Tensor

    def run(self, out: Tensor, **options: Any) -> None:
        prefix_attention(self.query, self.key, self.value, self.valid, out=out, **options)

    def exact(self) -> Tensor:
        """float64, of the valid rows only, so that what stands behind them cannot matter."""
        rows, live = self.query.shape[0], int(self.valid)
        out = torch.empty(rows, 2048, device=DEVICE, dtype=torch.float64)
        key, value = (torch.zeros_like(t, dtype=torch.float64) for t in (self.key, self.value))
        key[:live], value[:live] = self.key[:live].double(), self.value[:live].double()
        reference(self.query.double(), key, value, self.valid, out=out)
        return out


def draw(rows: int, valid: int, *, scale: float = 1.0, poison: float = float("nan"), seed: int = 0) -> Case:
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE, generator=generator)

    qkv = (random(rows, 2560) * scale).bfloat16()
    cache = random(2, rows + 40, 1, 256).bfloat16()
    cache[:, valid:] = poison
    query = qkv[:, :2048].view(rows, 8, 256)
    return Case(query, cache[0, :rows], cache[1, :rows], torch.tensor([valid], dtype=torch.int32, device=DEVICE))


def framed(rows: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """Rows inside a larger buffer full of one byte, and what stands in front of and behind them, as bytes."""
    nbytes = 2048 * torch.empty(0, dtype=dtype).element_size()
    buffer = torch.full(((rows + 32) * nbytes,), 0xA5, dtype=torch.uint8, device=DEVICE)
    inside = buffer[16 * nbytes : (rows + 16) * nbytes].view(dtype).view(rows, 2048)
    return inside, buffer[: 16 * nbytes], buffer[(rows + 16) * nbytes :]


@pytest.mark.parametrize(("rows", "valid"), LENGTHS)
def test_it_is_the_reference_and_writes_nothing_else(rows: int, valid: int) -> None:
    case = draw(rows, valid)
    out, front, behind = framed(rows)
    case.run(out)
    assert distance(out.double(), case.exact()) < BOUND
    assert (front == 0xA5).all()
    assert (behind == 0xA5).all()


def test_each_head_row_and_column_is_in_its_place() -> None:
    """Each query finds one key that is far ahead of the others, so that its value comes back as it is."""
    rows = 712
    case = draw(rows, rows)
    at = torch.arange(rows, device=DEVICE)
    chosen = (at[:, None] * 37 + torch.arange(8, device=DEVICE) * 101) % rows
    case.query.copy_(case.key[chosen, 0] * 8)
    out = torch.empty(rows, 2048, device=DEVICE, dtype=torch.bfloat16)
    case.run(out)
    assert torch.equal(out.view(rows, 8, 256), case.value[chosen, 0])


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("valid", [1, 33, 127, 500, 641])
def test_what_stands_behind_the_valid_rows_changes_no_bit(valid: int, poison: float) -> None:
    outs = []
    for behind in (0.0, poison):
        out = torch.empty(712, 2048, device=DEVICE, dtype=torch.bfloat16)
        draw(712, valid, poison=behind).run(out)
        outs.append(out)
    assert outs[1].isfinite().all()
    assert torch.equal(*outs)


@pytest.mark.parametrize("scale", [30.0, 1e4, 1e30])
def test_large_scores(scale: float) -> None:
    case = draw(712, 600, scale=scale)
    out = torch.empty(712, 2048, device=DEVICE, dtype=torch.bfloat16)
    case.run(out)
    assert out.isfinite().all()
    # Scores are sums of float32 products: the greater they are, the more the last bits of a sum decide a weight.
    if scale < 100:
        assert distance(out.double(), case.exact()) < BOUND
    else:
        chosen = torch.einsum("rhd,kd->rhk", case.query.double(), case.key[:600, 0].double()).topk(2, dim=2)
        clear = chosen.values[..., 0] - chosen.values[..., 1] > 1e-3 * chosen.values[..., 0].abs()
        winners = case.value[chosen.indices[..., 0], 0]
        assert clear.sum() > 4000
        assert torch.equal(out.view(712, 8, 256)[clear], winners[clear])


def test_replays_give_equal_bits_with_and_without_overlap() -> None:
    cases = [draw(712, valid, seed=valid) for valid in (712, 526, 65, 600)]
    shared = draw(712, 712)
    outs = torch.empty(4, 712, 2048, device=DEVICE, dtype=torch.bfloat16)

    def body(overlap: bool) -> None:
        for case, out in zip(cases, outs, strict=True):
            shared.query.copy_(case.query)
            shared.key.copy_(case.key)
            shared.value.copy_(case.value)
            shared.valid.copy_(case.valid)
            shared.run(out, overlap=overlap)

    assert_replays_give_equal_bits(body, outs)


def test_launches_that_follow_each_other_overlap_without_mixing() -> None:
    """The next launch begins while this one still works: it reads what this one writes."""
    case = draw(712, 700)
    chains = []
    for overlap in (False, True):
        buffers = [case.query.clone().view(712, 2048), *(torch.empty_like(case.query).view(712, 2048) for _ in "abc")]
        for source, target in pairwise(buffers):
            query = source.view(712, 8, 256)
            prefix_attention(query, case.key, case.value, case.valid, out=target, overlap=overlap)
        chains.append(buffers[-1])
    assert torch.equal(*chains)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("rows", "valid"), [(712, 526), (968, 968), (13, 9)])
def test_codes_are_those_of_the_rounded_result(rows: int, valid: int, overlap: bool) -> None:
    case = draw(rows, valid)
    plain = torch.empty(rows, 2048, device=DEVICE, dtype=torch.bfloat16)
    case.run(plain)
    quantiser = Quantiser(torch.tensor([float(plain.abs().amax()) / 448 / 2], device=DEVICE))  # some values saturate
    wanted = torch.empty(rows, 2048, device=DEVICE, dtype=CODES)
    kernels.quantise(plain, quantiser, out=wanted)
    out, front, behind = framed(rows, CODES)
    case.run(out, quantiser=quantiser, overlap=overlap)
    assert torch.equal(out.view(torch.uint8), wanted.view(torch.uint8))
    assert (front == 0xA5).all()
    assert (behind == 0xA5).all()
