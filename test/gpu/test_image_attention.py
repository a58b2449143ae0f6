"""The kernel of image attention against PyTorch in float32, and its codes against those of its own bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashrt_ros.ops import attention
from flashrt_ros.ops.cuda.image_attention import image_attention
from flashrt_ros.ops.cuda.rows import CODES, Quantiser, quantise
from test.gpu.fused import DEVICE, NEEDS_KERNELS, distance

pytestmark = NEEDS_KERNELS

BOUND = 4e-3  # weights and results are rounded to bfloat16, each by 1.7e-3 of a random vector
SIGLIP, SMALL = (16, 256, 72), (3, 64, 24)
SHAPES = [  # images, heads, tokens, head_dim
    (2, *SIGLIP), (3, *SIGLIP), (1, *SIGLIP), (2, *SMALL), (1, 2, 128, 40), (2, 1, 192, 88), (1, 1, 256, 120),
    (5, 3, 128, 72),
]  # fmt: skip
Variant = dict[str, int]
MMA: Variant = {"WARPGROUPS": 0}  # what other GPUs get
VARIANTS: list[Variant] = [
    {"CLUSTER": 1}, {"CLUSTER": 4}, MMA, {**MMA, "CLUSTER": 1}, {**MMA, "CLUSTER": 4}, {"WARPGROUPS": 1},
    {"KEY_LINE": 64}, {"VALUE_LINE": 128}, {"VALUE_PIECES": 2},
]  # fmt: skip
OVERLAP = pytest.mark.parametrize("overlap", [False, True])
KERNEL = pytest.mark.parametrize("variant", [None, MMA], ids=["usual", "mma"])
_BEHIND = 70  # rows


def drawn(shape: tuple[int, int, int, int], scale: float = 1.0) -> Tensor:
    images, heads, tokens, head_dim = shape
    generator = torch.Generator(DEVICE).manual_seed(sum(shape))
    values = torch.randn(images * tokens, 3 * heads * head_dim, device=DEVICE, generator=generator)
    return (values * scale).bfloat16()


def poisoned(shape: tuple[int, int, int, int], dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """Rows in the middle of a larger buffer, what lies in front of them, and what lies behind; all NaN."""
    images, heads, tokens, head_dim = shape
    rows = images * tokens
    buffer = torch.full((rows + 2 * _BEHIND, heads * head_dim), float("nan"), device=DEVICE).to(dtype)
    return buffer[_BEHIND : _BEHIND + rows], buffer[:_BEHIND], buffer[_BEHIND + rows :]


def expected(qkv: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    images, heads, tokens, head_dim = shape
    out = torch.empty(images * tokens, heads * head_dim, device=DEVICE, dtype=torch.float64)
    attention.image_attention(qkv.double(), images=images, heads=heads, out=out)
    return out


def run(
    qkv: Tensor, shape: tuple[int, int, int, int], *, overlap: bool = False, variant: Variant | None = None
) -> Tensor:
    """The result; nothing beside it is written, nor is what is read."""
    kept = qkv.clone()
    out, front, behind = poisoned(shape)
    image_attention(qkv, images=shape[0], heads=shape[1], out=out, overlap=overlap, variant=variant)
    assert front.isnan().all()
    assert behind.isnan().all()
    assert torch.equal(qkv.view(torch.int16), kept.view(torch.int16))  # by bits: some tests read what is not a number
    return out


@KERNEL
@OVERLAP
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_what_the_reference_defines(
    shape: tuple[int, int, int, int], overlap: bool, variant: Variant | None
) -> None:
    qkv = drawn(shape)
    got, wanted = run(qkv, shape, overlap=overlap, variant=variant).double(), expected(qkv, shape)
    assert distance(got, wanted) < BOUND
    assert float((got - wanted).abs().max()) < 0.02 * float(wanted.abs().max())  # no row, no column by itself


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_way_to_compile_it_is_right(variant: Variant) -> None:
    shape = (2, *SIGLIP)
    qkv = drawn(shape)
    assert distance(run(qkv, shape, variant=variant).double(), expected(qkv, shape)) < BOUND


def test_large_scores_stay_finite() -> None:
    shape = (2, *SIGLIP)
    qkv = drawn(shape, scale=30.0)  # scores of thousands: nearly all of a row's weight is on one key
    got = run(qkv, shape).double()
    assert got.isfinite().all()
    assert distance(got, expected(qkv, shape)) < BOUND


def test_one_half_of_the_keys_may_weigh_nothing() -> None:
    shape = (1, *SIGLIP)
    qkv = drawn(shape).view(256, 3, 16, 72)
    qkv[:, 0], qkv[:128, 1], qkv[128:, 1] = 8.0, -8.0, 8.0
    packed = qkv.view(256, -1)
    assert distance(run(packed, shape).double(), expected(packed, shape)) < BOUND


def test_images_and_heads_do_not_see_each_other() -> None:
    shape = (2, *SIGLIP)
    qkv = drawn(shape)
    before = run(qkv, shape)
    qkv[256:] = float("nan")
    qkv.view(512, 3, 16, 72)[:, :, 5] = float("nan")
    after = run(qkv, shape)
    assert after[256:].isnan().all()
    kept = [head for head in range(16) if head != 5]
    assert torch.equal(after[:256].view(256, 16, 72)[:, kept], before[:256].view(256, 16, 72)[:, kept])
    assert after.view(512, 16, 72)[:, 5].isnan().all()


@pytest.mark.parametrize("shape", [(2, *SIGLIP), (3, *SIGLIP)])
def test_overlap_and_repetition_change_no_bit(shape: tuple[int, int, int, int]) -> None:
    qkv = drawn(shape)
    first = run(qkv, shape)
    for overlap in (False, True, True):
        assert torch.equal(run(qkv, shape, overlap=overlap), first)


def test_with_overlap_it_waits_for_the_kernel_in_front() -> None:
    """A chain in which each reads what has just been written, and writes where has just been read."""
    shape = (2, *SIGLIP)
    start = drawn(shape)
    wanted = chain(start, shape, overlap=False)
    for _ in range(20):
        assert torch.equal(chain(start, shape, overlap=True), wanted)


def test_launches_of_one_kernel_may_ask_for_less_shared_memory_in_between() -> None:
    """Few blocks ask for more of it than many, to spread, and what the driver allows holds for all launches."""
    shapes = [(2, *SIGLIP), (3, *SIGLIP), (2, *SIGLIP), (1, *SIGLIP)]
    for shape in shapes:
        qkv = drawn(shape)
        assert torch.equal(run(qkv, shape, overlap=True), run(qkv, shape))


def chain(start: Tensor, shape: tuple[int, int, int, int], *, overlap: bool, links: int = 8) -> Tensor:
    """Two buffers take turns: three results fill one of them, which is then read."""
    images, heads, tokens, head_dim = shape
    rows, width = images * tokens, heads * head_dim
    buffers = [start.clone(), torch.empty_like(start)]
    for link in range(links):
        source, target = buffers[link % 2], buffers[1 - link % 2]
        for third in range(3):
            out = target.view(-1)[third * rows * width : (third + 1) * rows * width].view(rows, width)
            image_attention(source, images=images, heads=heads, out=out, overlap=overlap)
    return buffers[links % 2]


@KERNEL
@OVERLAP
@pytest.mark.parametrize("shape", [(2, *SIGLIP), (3, *SIGLIP), (2, *SMALL), (2, 1, 192, 88)])
def test_codes_are_those_of_its_own_bfloat16(
    shape: tuple[int, int, int, int], overlap: bool, variant: Variant | None
) -> None:
    qkv, how = drawn(shape), Quantiser(torch.full((1,), 0.0013, device=DEVICE))
    plain = run(qkv, shape, variant=variant).contiguous()
    wanted = torch.empty(plain.shape, device=DEVICE, dtype=CODES)
    quantise(plain, how, out=wanted)
    out, front, behind = poisoned(shape, CODES)
    image_attention(qkv, images=shape[0], heads=shape[1], out=out, quantiser=how, overlap=overlap, variant=variant)
    assert torch.equal(out.view(torch.uint8), wanted.view(torch.uint8))
    assert front.float().isnan().all()
    assert behind.float().isnan().all()


def test_a_captured_launch_gives_the_same_bits() -> None:
    shape = (2, *SIGLIP)
    qkv = drawn(shape)
    wanted, out = run(qkv, shape), poisoned(shape)[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            image_attention(qkv, images=2, heads=16, out=out, overlap=True)
    graph.replay()
    assert torch.equal(out, wanted)
