"""How the expert's weights are packed for streaming."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashrt_ros.ops import ShapeError
from flashrt_ros.ops.cuda.errors import KernelError
from flashrt_ros.ops.cuda.expert import ExpertKernel, ShiftTables
from flashrt_ros.ops.cuda.expert_codes import (
    E2M1,
    E4M3,
    LACKING,
    Codes,
    Interleaving,
    share_of_nvfp4,
    share_order,
    tiles_of_e4m3,
    tiles_of_nvfp4,
    values_of_e4m3,
    values_of_nvfp4,
    values_of_nvfp4_share,
    weight_of_share,
)
from flashrt_ros.ops.cuda.expert_packing import (
    ExpertWeights,
    pack,
    pack_tiles,
    packed_bytes,
    rotary_pairs,
    tile_order,
    unpack_tiles,
)
from flashrt_ros.precision import e2m1, e4m3, nvfp4


def test_a_tile_holds_matrices_of_eight_outputs_by_eight_inputs() -> None:
    layers, outputs, inputs = 2, 24, 2048
    weight = torch.arange(layers * outputs * inputs).view(layers, outputs, inputs)
    packed = pack_tiles(weight)
    assert packed.shape == (layers, 8, 4, outputs // 8, 8, 8, 8)
    assert packed.is_contiguous()
    for layer, output, column in ((0, 0, 0), (1, 23, 2047), (1, 9, 1024 + 5 * 32 + 2 * 8 + 3), (0, 17, 700)):
        rank, inside = divmod(column, inputs // 8)
        chunk, rest = divmod(inside, 64)
        group, element = divmod(rest, 8)
        got = packed[layer, rank, chunk, output // 8, group, output % 8, element]
        assert got == weight[layer, output, column]


def test_packing_can_be_undone() -> None:
    weight = torch.arange(2 * 24 * 2048).view(2, 24, 2048)
    assert torch.equal(unpack_tiles(pack_tiles(weight)), weight)


def test_tables_hold_what_the_shifts_give() -> None:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    qkv, gate_up = (drawn(2, outputs, 1024).bfloat16() for outputs in (2560, 8192))
    zeros = torch.zeros(2, 1024, 2048).bfloat16(), torch.zeros(2, 1024, 4096).bfloat16()
    leave, bias = drawn(32, 1024), drawn(32)
    enter = torch.zeros(1024, 32), torch.zeros(1024)
    weights = pack(qkv, zeros[0], gate_up, zeros[1], enter, (leave, bias), few_rows=True)
    modulation = drawn(3, 5, 3, 1024)
    tables = ShiftTables.allocate(weights, steps=3)
    tables.fill(weights, modulation)
    order = torch.cat((rotary_pairs(9), torch.arange(2304, 2560)))
    torch.testing.assert_close(tables.project[2, 1], qkv[1, order].float() @ modulation[2, 2, 1], rtol=1e-4, atol=1e-3)
    gate, up = (gate_up[0, start : start + 4096].float() @ modulation[1, 1, 1] for start in (0, 4096))
    torch.testing.assert_close(tables.gate_up[1, 0, :8], gate[:8], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(tables.gate_up[1, 0, -8:], up[-8:], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(tables.leave[0], leave @ modulation[0, 4, 1] + bias, rtol=1e-4, atol=1e-3)


# -- codes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [E4M3, E2M1])
def test_codes_that_share_a_word_come_out_again(how: Interleaving) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 1 << len(how.bits), (4096, how.codes), generator=generator, dtype=torch.uint8)
    assert torch.equal(how.split(how.join(codes)), codes)


def drawn_e4m3(outputs: int, inputs: int) -> torch.Tensor:
    """Every code but NaN, subnormal ones and both zeros among them."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (outputs, inputs), generator=generator, dtype=torch.uint8)
    return torch.where(codes & 127 == 127, codes - 1, codes)


def drawn_nvfp4(outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every code, and every scale but NaN."""
    generator = torch.Generator().manual_seed(2)
    packed = torch.randint(0, 256, (outputs, inputs // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(0, 127, (outputs, inputs // 16), generator=generator, dtype=torch.uint8)
    return packed, scales


def values_with_scales(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return e2m1.decode(e2m1.unpack(packed)) * e4m3.decode(scales).repeat_interleave(16, dim=-1)


def test_packing_codes_can_be_undone_bit_by_bit() -> None:
    codes = drawn_e4m3(16, 1024)
    assert torch.equal(values_of_e4m3(tiles_of_e4m3(codes)), e4m3.decode(codes))
    packed, scales = drawn_nvfp4(16, 1024)
    assert torch.equal(values_of_nvfp4(tiles_of_nvfp4(packed, scales)), values_with_scales(packed, scales))


def two_bfloat16(word: int) -> tuple[float, float]:
    low, high = torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return float(low), float(high)


def word_at(tile: torch.Tensor, offset: int) -> int:
    return int.from_bytes(bytes(tile[offset : offset + 4].tolist()), "little")


@pytest.mark.parametrize(("rank", "chunk", "tile", "lane"), [(0, 0, 0, 0), (7, 1, 1, 31), (3, 1, 0, 13), (5, 0, 1, 18)])
def test_a_lane_of_the_kernel_finds_its_operands(rank: int, chunk: int, tile: int, lane: int) -> None:
    """In the words and by the shifts that kernels/expert_weights.cuh has written down."""
    row, quad = divmod(lane, 4)
    codes, (packed, scales) = drawn_e4m3(16, 1024), drawn_nvfp4(16, 1024)
    eight, four = tiles_of_e4m3(codes)[rank, chunk, tile], tiles_of_nvfp4(packed, scales)[rank, chunk, tile]
    of_eight, of_four = e4m3.decode(codes), values_with_scales(packed, scales)
    stored = word_at(four, 256 + 4 * row)
    swapped = (stored & 0x00FF00FF) << 8 | stored >> 8 & 0x00FF00FF
    for step in range(4):
        first = rank * 128 + chunk * 64 + step * 16 + 2 * quad
        word = word_at(eight, step // 2 * 256 + lane * 8 + step % 2 * 4)
        pairs = word & 0x87F087F0, (word << 4 ^ word >> 4) & 0x87F087F0
        for half, pair in enumerate(pairs):
            expected = of_eight[8 * tile + row, first + 8 * half :][:2].tolist()
            assert [value * 2.0**80 * LACKING[8] for value in two_bfloat16(pair)] == expected
        word, odd = word_at(four, lane * 8 + step // 2 * 4), step % 2
        pairs = (word << 12 ^ word >> 20, word << 2 ^ word >> 6) if odd else (word, word << 6)
        scale = two_bfloat16((swapped if odd else stored) & 0x0FF00FF0 | 0x70007000)[step // 2]
        for half, pair in enumerate(pairs):
            expected = of_four[8 * tile + row, first + 8 * half :][:2].tolist()
            got = [value * scale * LACKING[4] for value in two_bfloat16(pair & 0x81C081C0)]
            assert got == expected


def drawn_codes(kind: str, outputs: int, inputs: int, layers: int = 2) -> tuple[Codes, torch.Tensor]:
    """Codes of random matrices, and what they stand for."""
    generator = torch.Generator().manual_seed(outputs)
    matrices = torch.randn(layers, outputs, inputs, generator=generator)
    if kind == "e4m3":
        pairs = [e4m3.quantise_weight(matrix, by_channel=True) for matrix in matrices]
        codes, scales = (torch.stack(parts) for parts in zip(*pairs, strict=True))
        return Codes(codes, scales), e4m3.decode(codes) * scales[..., None]
    made = [nvfp4.quantise_weight(matrix) for matrix in matrices]
    factor = torch.stack([each.tensor_scale.expand(outputs) for each in made])
    values, scales = torch.stack([each.packed for each in made]), torch.stack([each.scales for each in made])
    return Codes(values, factor, scales), torch.stack([each.decode() for each in made])


def packed_codes(kind: str, few_rows: bool) -> tuple[ExpertWeights, dict[str, torch.Tensor]]:
    made = {
        name: drawn_codes(kind, outputs, inputs)
        for name, outputs, inputs in (
            ("qkv", 2560, 1024), ("output", 1024, 2048), ("gate_up", 8192, 1024), ("down", 1024, 4096),
        )
    }  # fmt: skip
    ends = (torch.zeros(1024, 32), torch.zeros(1024)), (torch.zeros(32, 1024), torch.zeros(32))
    qkv, output, gate_up, down = (codes for codes, _ in made.values())
    weights = pack(qkv, output, gate_up, down, *ends, few_rows=few_rows)
    return weights, {name: matrix for name, (_, matrix) in made.items()}


@pytest.mark.parametrize("few_rows", [True, False])
@pytest.mark.parametrize(("kind", "bits"), [("e4m3", 8), ("nvfp4", 4)])
def test_narrow_weights_keep_their_values_and_tables_their_factors(kind: str, bits: int, few_rows: bool) -> None:
    weights, matrices = packed_codes(kind, few_rows)
    assert [stream.for_few_rows for stream in weights.streams] == [False, False, False, few_rows]
    assert weights.bits == (bits,) * 4
    pairs = torch.cat((rotary_pairs(9), torch.arange(2304, 2560)))
    orders = {"qkv": pairs, "output": None, "gate_up": tile_order(4096), "down": None}
    for stream, (name, order) in zip(weights.streams, orders.items(), strict=True):
        matrix = matrices[name] if order is None else matrices[name][:, order]
        torch.testing.assert_close(stream.matrix(1), matrix[1], rtol=1e-6, atol=0.0)
        assert stream.factor is not None
        assert stream.tiles.nbytes + stream.factor.nbytes == packed_bytes(bits, *matrix.shape)
    modulation = torch.randn(1, 5, 3, 1024, generator=torch.Generator().manual_seed(5))
    tables = ShiftTables.allocate(weights, steps=1)
    tables.fill(weights, modulation)
    expected = matrices["qkv"][1, pairs] @ modulation[0, 2, 1]
    torch.testing.assert_close(tables.project[0, 1], expected, rtol=1e-4, atol=1e-3)
    expected = matrices["gate_up"][0, tile_order(4096)] @ modulation[0, 1, 1]
    torch.testing.assert_close(tables.gate_up[0, 0], expected, rtol=1e-4, atol=1e-3)


SHAPES = {"qkv": (2560, 1024), "output": (1024, 2048), "gate_up": (8192, 1024), "down": (1024, 4096)}


def pack_with(few_rows: bool = True, **given: torch.Tensor | Codes) -> ExpertWeights:
    """One layer of zeros, but for what is given."""
    matrices: dict[str, torch.Tensor | Codes] = {
        name: torch.zeros(1, *shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()
    }
    ends = (torch.zeros(1024, 32), torch.zeros(1024)), (torch.zeros(32, 1024), torch.zeros(32))
    qkv, output, gate_up, down = {**matrices, **given}.values()
    return pack(qkv, output, gate_up, down, *ends, few_rows=few_rows)


def test_scales_that_are_no_numbers_are_refused() -> None:
    codes, _ = drawn_codes("nvfp4", 1024, 2048, layers=1)
    assert codes.scales is not None
    codes.scales[0, 3, 5] = 127
    with pytest.raises(KernelError, match=r"'output.scales' must be E4M3 codes from 0 to 126, got 127"):
        pack_with(output=codes)


@pytest.mark.parametrize("few_rows", [True, False])
@pytest.mark.parametrize("code", [127, 255])
def test_codes_that_are_no_numbers_are_refused(code: int, few_rows: bool) -> None:
    """The kernel would read them as 480, while the tables of what shifts give would hold NaN."""
    codes, _ = drawn_codes("e4m3", 1024, 4096, layers=1)
    codes.values[0, 1023, 17] = code
    with pytest.raises(KernelError, match=r"'down.values' must be E4M3 codes of numbers, got 127 or 255"):
        pack_with(few_rows, down=codes)


def zero_codes(kind: str) -> Codes:
    """For qkv, whose outputs change their order."""
    factor, width = torch.ones(1, 2560), 1024 if kind == "e4m3" else 512
    scales = None if kind == "e4m3" else torch.zeros(1, 2560, 64, dtype=torch.uint8)
    return Codes(torch.zeros(1, 2560, width, dtype=torch.uint8), factor, scales)


@pytest.mark.parametrize("outputs", [1, 2559, 9999])
def test_parts_of_codes_that_do_not_fit_are_refused_before_their_outputs_are_ordered(outputs: int) -> None:
    """Behind that, a GPU would have stopped for an index without an end, or the rest been dropped."""
    wrong = replace(zero_codes("e4m3"), factor=torch.ones(1, outputs))
    with pytest.raises(ShapeError, match=f"'qkv.factor' dimension 1 must be 2560 .*, got {outputs}"):
        pack_with(qkv=wrong)
    wrong = replace(zero_codes("nvfp4"), scales=torch.zeros(1, outputs, 64, dtype=torch.uint8))
    with pytest.raises(ShapeError, match=f"'qkv.scales' dimension 1 must be 2560 .*, got {outputs}"):
        pack_with(qkv=wrong)
    with pytest.raises(ShapeError, match="'qkv' needs 3 dimensions"):
        pack_with(qkv=replace(zero_codes("e4m3"), values=torch.zeros(2560, 1024, dtype=torch.uint8)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.zeros(1, 2560, 1024), "'qkv' must be torch.bfloat16, got torch.float32"),
        (replace(zero_codes("e4m3"), factor=torch.ones(1, 2560).bfloat16()), "'qkv.factor' must be torch.float32"),
        (replace(zero_codes("nvfp4"), scales=torch.zeros(1, 2560, 64)), "'qkv.scales' must"),
        (
            replace(zero_codes("e4m3"), values=torch.zeros(1, 2560, 1024, dtype=torch.float8_e4m3fn)),
            "'qkv.values' must be torch.uint8, got torch.float8_e4m3fn",
        ),
    ],
    ids=["matrix", "factor", "scales", "values"],
)
def test_types_that_the_kernel_would_misread_are_refused(given: torch.Tensor | Codes, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        pack_with(qkv=given)


# -- `down` of few rows ------------------------------------------------------------------------------------------------


def test_a_share_is_packed_in_blocks_of_inputs_with_all_outputs_of_a_rank() -> None:
    """[rank][block of 32 inputs][group of four tiles and step][tile][half of a step], eight outputs by two quads."""
    weight = torch.arange(1024 * 4096).view(1024, 4096)
    packed = pack_tiles(share_order(weight)[None])[0]
    assert packed.shape == (8, 128, 8, 8, 8, 8)
    for output, column in (
        (0, 0),
        (1023, 4095),
        (3 * 128 + 2 * 32 + 1 * 8 + 5, 77 * 32 + 2 * 8 + 1 * 4 + 3),
        (200, 37),
    ):
        (rank, of_rank), (block, of_block) = divmod(output, 128), divmod(column, 32)
        (group, of_group), (quad, of_quad) = divmod(of_rank, 32), divmod(of_block, 8)
        (tile, row), (step, of_step) = divmod(of_group, 8), divmod(of_quad, 4)
        half, value = divmod(of_step, 2)
        got = packed[rank, block, 2 * group + step, 2 * tile + half, row, 2 * quad + value]
        assert got == weight[output, column]


def test_packing_a_share_can_be_undone() -> None:
    weight = torch.arange(1024 * 256).view(1024, 256)
    assert torch.equal(weight_of_share(share_order(weight), 1024), weight)
    packed, scales = drawn_nvfp4(1024, 256)
    values = values_of_nvfp4_share(share_of_nvfp4(packed, scales), 1024)
    assert torch.equal(values, values_with_scales(packed, scales))


@pytest.mark.parametrize("few_rows", [True, False])
def test_packed_weights_of_16_bits_stand_for_themselves(few_rows: bool) -> None:
    down = torch.randn(1, 1024, 4096, generator=torch.Generator().manual_seed(3)).bfloat16()
    stream = pack_with(few_rows, down=down).down
    assert torch.equal(stream.matrix(0), down[0].float())
    assert stream.tiles.nbytes == packed_bytes(16, *down.shape)


@pytest.mark.parametrize(
    ("rank", "block", "group", "lane"), [(0, 0, 0, 0), (7, 7, 3, 31), (2, 5, 1, 14), (5, 3, 2, 17)]
)
def test_a_lane_of_the_kernel_finds_its_part_of_a_share(rank: int, block: int, group: int, lane: int) -> None:
    """As kernels/expert_hidden.cuh takes it: what is a step of a tile elsewhere is a tile of a step."""
    row, quad = divmod(lane, 4)
    codes, (packed, scales) = drawn_e4m3(1024, 256), drawn_nvfp4(1024, 256)
    eight, four = tiles_of_e4m3(share_order(codes))[rank, block], share_of_nvfp4(packed, scales)[rank, block]
    of_eight, of_four = e4m3.decode(codes), values_with_scales(packed, scales)
    stored = word_at(four[2 * group + quad // 2], 256 + 4 * row)  # of the lower quads, or of the upper ones
    swapped = (stored & 0x00FF00FF) << 8 | stored >> 8 & 0x00FF00FF
    for step in range(2):
        for tile in range(4):
            output, first = rank * 128 + (4 * group + tile) * 8 + row, block * 32 + quad * 8 + step * 4
            word, odd = word_at(eight[2 * group + step], tile // 2 * 256 + lane * 8 + tile % 2 * 4), tile % 2
            for half, pair in enumerate((word & 0x87F087F0, (word << 4 ^ word >> 4) & 0x87F087F0)):
                expected = of_eight[output, first + 2 * half :][:2].tolist()
                assert [value * 2.0**80 * LACKING[8] for value in two_bfloat16(pair)] == expected
            word = word_at(four[2 * group + step], lane * 8 + tile // 2 * 4)
            pairs = (word << 12 ^ word >> 20, word << 2 ^ word >> 6) if odd else (word, word << 6)
            scale = two_bfloat16((swapped if odd else stored) & 0x0FF00FF0 | 0x70007000)[tile // 2]
            for half, pair in enumerate(pairs):
                expected = of_four[output, first + 2 * half :][:2].tolist()
                assert [value * scale * LACKING[4] for value in two_bfloat16(pair & 0x81C081C0)] == expected


@pytest.mark.parametrize(
    ("rows", "few_rows", "message"),
    [(10, False, "packed for more than 16 rows, the chunk has 10"), (17, True, "at most 16 rows, the chunk has 17")],
)
def test_weights_that_are_packed_for_another_length_are_refused(rows: int, few_rows: bool, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        ExpertKernel(pack_with(few_rows), rows, 10, capacity=712)


# -- order -------------------------------------------------------------------------------------------------------------


def test_tiles_of_gate_and_up_alternate() -> None:
    order = tile_order(32).tolist()  # 32 of gate, 32 of up
    assert order[:24] == [*range(8), *range(32, 40), *range(8, 16)]
    assert sorted(order) == list(range(64))


def test_rotary_pairs_stand_side_by_side() -> None:
    order = rotary_pairs(2)
    assert sorted(order.tolist()) == list(range(512))
    assert order[:4].tolist() == [0, 128, 1, 129]
    assert order[256:260].tolist() == [256, 384, 257, 385]


def test_wrong_weights_are_named() -> None:
    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, device="meta")

    ends = (zeros(1024, 32), zeros(1024)), (zeros(32, 1024), zeros(32))
    with pytest.raises(ShapeError, match="expert weights: 'down' dimension 2 must be 4096"):
        pack(
            zeros(1, 2560, 1024), zeros(1, 1024, 2048), zeros(1, 8192, 1024), zeros(1, 1024, 2048), *ends, few_rows=True
        )
