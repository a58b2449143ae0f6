"""Codes of narrow weights in the order and with the bits in which the expert's kernel reads them, and back.

`kernels/expert_weights.cuh` has the other side. A word holds the codes of two (E4M3) or four (NVFP4) pairs of values,
interleaved so that two shifts and one mask leave a pair with sign, exponent and mantissa where bfloat16 has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import frexp

import torch
from torch import Tensor

from ..shapes import check
from .errors import KernelError

CHUNK = 64  # inputs of a tile that lie together
RANKS = 8  # blocks of a cluster, which share the inputs of every product and the keys
BLOCK = 16  # inputs of an output that have one scale in NVFP4
_LANES, _TILE = 32, 8
HIDDEN_BLOCK = 32  # inputs of `down` that have one cluster with few rows
_GROUPS, _TILES = 4, 4  # of tiles of a rank's outputs, and tiles of a group: see kernels/expert_hidden.cuh
SHARE_TILES = 2 * _GROUPS  # of what `share_order` gives
_WORD_BITS = 32
LACKING = {8: 2.0**40, 4: 2.0**7}
"""By how much the kernel's sums of weights with so many bits are too small (see kernels/expert_weights.cuh)."""
_LEAST_EXPONENT = 22  # what is added to the exponent of a block's scale, from -9 to 8, to make five bits
_LARGEST_SCALE = 126  # code of E4M3; 127 is NaN
_NAN = 127  # of E4M3, without its sign
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Interleaving:
    """How codes share a word: pair i is the exclusive or of the word under `shifts[i]`, left if positive.

    Args:
        bits: of half a pair, those that hold a code, from its lowest bit on.
        shifts: of each pair.
    """

    bits: tuple[int, ...]
    shifts: tuple[tuple[int, ...], ...]

    @property
    def codes(self) -> int:
        """How many share a word."""
        return 2 * len(self.shifts)

    def join(self, codes: Tensor) -> Tensor:
        """int32[...] words of uint8[..., codes], a pair's first value in its low half."""
        tables = _tables(self, codes.device)
        words = tables[0][codes[..., 0].int()]
        for place in range(1, self.codes):
            words ^= tables[place][codes[..., place].int()]
        return words

    def split(self, words: Tensor) -> Tensor:
        """uint8[..., codes] of int32[...] words: what the kernel's shifts give."""
        wide = words.long() & 0xFFFFFFFF
        parts = []
        for shifts in self.shifts:
            pair = torch.zeros_like(wide)
            for shift in shifts:
                pair ^= wide << shift if shift > 0 else wide >> -shift
            for half in (0, 16):
                code = torch.zeros_like(pair)
                for place, bit in enumerate(self.bits):
                    code |= (pair >> half + bit & 1) << place
                parts.append(code.to(torch.uint8))
        return torch.stack(parts, dim=-1)

    def _equations(self) -> Iterator[int]:
        """For each bit of each code, the bits of the word that it is the exclusive or of."""
        for shifts in self.shifts:
            for half in (0, 16):
                for bit in self.bits:
                    sources = (half + bit - shift for shift in shifts)
                    yield sum(1 << source for source in sources if 0 <= source < _WORD_BITS)

    def words_of_bits(self) -> list[int]:
        """For each bit of each code, the word that has this bit alone: the equations' inverse."""
        rows = [equation | 1 << _WORD_BITS + i for i, equation in enumerate(self._equations())]
        for bit in range(_WORD_BITS):
            pivot = next(i for i in range(bit, _WORD_BITS) if rows[i] >> bit & 1)
            rows[bit], rows[pivot] = rows[pivot], rows[bit]
            rows = [row ^ rows[bit] if i != bit and row >> bit & 1 else row for i, row in enumerate(rows)]
        return [sum((row >> _WORD_BITS + i & 1) << bit for bit, row in enumerate(rows)) for i in range(_WORD_BITS)]


E4M3 = Interleaving((4, 5, 6, 7, 8, 9, 10, 15), ((0,), (4, -4)))
E2M1 = Interleaving((6, 7, 8, 15), ((0,), (6,), (12, -20), (2, -6)))


@lru_cache(maxsize=8)
def _tables(how: Interleaving, device: torch.device) -> tuple[Tensor, ...]:
    """For each place in a word int32[codes]: the word that holds the code there, and zeros elsewhere."""
    alone, width = how.words_of_bits(), len(how.bits)
    tables = []
    for place in range(how.codes):
        words = [0]
        for word in alone[place * width : (place + 1) * width]:
            words += [other ^ word for other in words]
        tables.append(torch.tensor([word - (word >> 31 << 32) for word in words], dtype=torch.int32, device=device))
    return tuple(tables)


@dataclass(frozen=True)
class Codes:
    """A stack of matrices [layers, outputs, inputs] as codes.

    Args:
        values: uint8[layers, outputs, inputs] of E4M3; uint8[layers, outputs, inputs / 2] of NVFP4, two a byte.
        factor: float32[layers, outputs] that sums of decoded values are multiplied by.
        scales: uint8[layers, outputs, inputs / 16], codes of E4M3 for the blocks of NVFP4; None for E4M3.
    """

    values: Tensor
    factor: Tensor
    scales: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the stack."""
        return *self.values.shape[:-1], self.values.shape[-1] * (1 if self.scales is None else 2)

    def check(self, name: str) -> None:
        """ShapeError or KernelError unless the parts of the stack called `name` fit each other and are numbers."""
        layers, outputs, inputs = self.shape
        check("expert weights", **{f"{name}.factor": (self.factor, (layers, outputs))})
        check_type(f"{name}.values", self.values, torch.uint8)
        check_type(f"{name}.factor", self.factor, torch.float32)
        if self.scales is None:
            if any(int((layer & _NAN).max()) == _NAN for layer in self.values):
                raise KernelError(
                    f"expert weights: '{name}.values' must be E4M3 codes of numbers, got {_NAN} or {_NAN | 128}, which "
                    "are NaN; quantise the weights again"
                )
            return
        check("expert weights", **{f"{name}.scales": (self.scales, (layers, outputs, inputs // BLOCK))})
        check_type(f"{name}.scales", self.scales, torch.uint8)
        largest = int(self.scales.max())
        if largest > _LARGEST_SCALE:
            raise KernelError(
                f"expert weights: '{name}.scales' must be E4M3 codes from 0 to {_LARGEST_SCALE}, got {largest}; "
                "quantise the weights again"
            )


def tiles_of_e4m3(codes: Tensor) -> Tensor:
    """uint8[outputs, inputs] → uint8[ranks, chunks, outputs / 8, 512]: [pair of steps 2][lane 32][step 2] words."""
    view = _parts(codes)
    ordered = view.permute(2, 3, 0, 4, 1, 7, 5, 6, 8).flatten(-2)
    return _bytes_of_tiles(E4M3.join(ordered))


def values_of_e4m3(tiles: Tensor) -> Tensor:
    """float32[outputs, inputs]: what `tiles_of_e4m3` stands for."""
    words = _with_last(tiles.view(torch.int32), 2, 8, 4, 2)  # rank, chunk, tile, pair, row, quad, step
    parts = _with_last(E4M3.split(words), 2, 2)
    codes = parts.permute(2, 4, 0, 1, 3, 6, 7, 5, 8).flatten(2).flatten(0, 1)
    return codes.view(torch.float8_e4m3fn).float()


def tiles_of_nvfp4(packed: Tensor, scales: Tensor) -> Tensor:
    """uint8[outputs, inputs / 2] and uint8[outputs, inputs / 16] → uint8[ranks, chunks, outputs / 8, 288].

    That is [lane 32][pair of steps 2] words of codes, then [output 8] words with the scales of four steps.
    """
    return _tiles_of_nvfp4(_existing(packed, scales), scales)


def _existing(packed: Tensor, scales: Tensor) -> Tensor:
    """uint8[outputs, inputs] of uint8[outputs, inputs / 2]: zeros where a block's scale is, which cannot be stored."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    return (_with_last(codes, -1, BLOCK) * (scales > 0)[..., None]).flatten(-2)


def _tiles_of_nvfp4(codes: Tensor, scales: Tensor) -> Tensor:
    """What `tiles_of_nvfp4` gives, of uint8[outputs, inputs] codes one by one."""
    view = _parts(codes)
    ordered = view.permute(2, 3, 0, 1, 7, 4, 5, 6, 8).flatten(-3)
    return torch.cat((_bytes_of_tiles(E2M1.join(ordered)), _bytes_of_scales(scales)), dim=-1)


def values_of_nvfp4(tiles: Tensor) -> Tensor:
    """float32[outputs, inputs]: what `tiles_of_nvfp4` stands for."""
    values, scales = _without_scales(tiles)
    return _scaled(values, scales)


def _without_scales(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """float32[outputs, inputs] and float32[outputs, blocks]: values and scales that lie in tiles of NVFP4."""
    codes, scales = tiles[..., : _LANES * 8].contiguous(), tiles[..., _LANES * 8 :]
    words = _with_last(codes.view(torch.int32), 8, 4, 2)  # rank, chunk, tile, row, quad, pair
    parts = _with_last(E2M1.split(words), 2, 2, 2)  # step, half, value
    ordered = parts.permute(2, 3, 0, 1, 5, 6, 7, 4, 8).flatten(2).flatten(0, 1)
    values = torch.tensor([*_FP4, *(-value for value in _FP4)], device=tiles.device)[ordered.int()]
    return values, _values_of_scales(scales)


def _scaled(values: Tensor, scales: Tensor) -> Tensor:
    """[outputs, inputs] times [outputs, blocks]."""
    return (_with_last(values, -1, BLOCK) * scales[..., None]).flatten(-2)


# -- `down` of few rows: all tiles of a rank's outputs for 32 inputs, in the place of the chunks of a tile -------------


def share_order(weight: Tensor) -> Tensor:
    """[outputs, inputs] as [64, inputs of all ranks]: in the tiles of that, a cluster finds its inputs as one piece.

    Inputs come in blocks of 32 of which a lane has eight neighbouring ones, four for each of two steps. Outputs are
    [group 4, step 2, output 8], inputs [rank 8, block, tile 4, input 16]: tiles and steps have changed places.
    """
    view = weight.view(RANKS, _GROUPS, _TILES, _TILE, -1, 4, 2, 2, 2)  # quad, step, half, value
    return view.permute(1, 6, 3, 0, 4, 2, 7, 5, 8).reshape(SHARE_TILES * _TILE, -1)


def weight_of_share(ordered: Tensor, outputs: int) -> Tensor:
    """The [outputs, inputs] that `share_order` made `ordered` of."""
    inputs = ordered.numel() // outputs
    view = ordered.view(_GROUPS, 2, _TILE, RANKS, inputs // HIDDEN_BLOCK, _TILES, 2, 4, 2)
    return view.permute(3, 0, 5, 2, 4, 7, 1, 6, 8).reshape(outputs, inputs)


def share_of_nvfp4(packed: Tensor, scales: Tensor) -> Tensor:
    """uint8[outputs, inputs / 2] and uint8[outputs, inputs / 16] → uint8[ranks, blocks of 32 inputs, 8, 288].

    The scales of a step are those of half a block: lanes of the lower quads have the first one's inputs in both steps.
    """
    view = scales.view(RANKS, _GROUPS, _TILES, _TILE, -1, 2)
    ordered = view.permute(1, 5, 3, 0, 4, 2).reshape(SHARE_TILES * _TILE, -1)
    return _tiles_of_nvfp4(share_order(_existing(packed, scales)), ordered)


def values_of_nvfp4_share(tiles: Tensor, outputs: int) -> Tensor:
    """float32[outputs, inputs]: what `share_of_nvfp4` stands for."""
    values, scales = _without_scales(tiles)
    view = scales.view(_GROUPS, 2, _TILE, RANKS, -1, _TILES)
    of_blocks = view.permute(3, 0, 5, 2, 4, 1).reshape(outputs, scales.numel() // outputs)
    return _scaled(weight_of_share(values, outputs), of_blocks)


def _with_last(x: Tensor, *sizes: int) -> Tensor:
    """`x` with its last dimension cut into several."""
    return x.reshape(*x.shape[:-1], *sizes)


def _parts(codes: Tensor) -> Tensor:
    """[tile, row, rank, chunk, pair of steps, step, half, quad, value] of [outputs, inputs]."""
    outputs, inputs = codes.shape
    return codes.view(outputs // _TILE, _TILE, RANKS, inputs // RANKS // CHUNK, 2, 2, 2, 4, 2)


def _bytes_of_tiles(words: Tensor) -> Tensor:
    """uint8[ranks, chunks, tiles, bytes] of int32[ranks, chunks, tiles, ...]."""
    return words.flatten(3).contiguous().view(torch.uint8)


def _bytes_of_scales(scales: Tensor) -> Tensor:
    """uint8[ranks, chunks, tiles, 32] of uint8[outputs, blocks]: of two steps, the first one's bits lie between the
    halves of the second one's."""
    table = _scale_codes(scales.device)
    outputs, blocks = scales.shape
    view = table[scales.int()].view(outputs // _TILE, _TILE, RANKS, blocks // RANKS // 4, 2, 2)
    first, second = view.permute(2, 3, 0, 1, 4, 5).unbind(-1)
    low, high = (first & 15) << 4 | second >> 4, first >> 4 | (second & 15) << 4
    return torch.stack((low, high), dim=-1).flatten(3)


def _values_of_scales(stored: Tensor) -> Tensor:
    """float32[outputs, blocks] of what `_bytes_of_scales` gave."""
    low, high = _with_last(stored, _TILE, 2, 2).unbind(-1)
    codes = torch.stack(((high & 15) << 4 | low >> 4, (low & 15) << 4 | high >> 4), dim=-1)
    table = [(1 + (code & 7) / 8) * 2.0 ** ((code >> 3) - _LEAST_EXPONENT) for code in range(256)]
    values = torch.tensor(table, device=stored.device)[codes.int()]
    return values.permute(2, 3, 0, 1, 4, 5).flatten(2).flatten(0, 1)


@lru_cache(maxsize=8)
def _scale_codes(device: torch.device) -> Tensor:
    """uint8[127]: five bits of exponent and three of mantissa for each code of E4M3; anything for zero."""
    codes = torch.arange(_LARGEST_SCALE + 1, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist()
    pairs = (frexp(value or 1.0) for value in codes)
    made = [exponent - 1 + _LEAST_EXPONENT << 3 | int(16 * mantissa - 8) for mantissa, exponent in pairs]
    return torch.tensor(made, dtype=torch.uint8, device=device)


def check_type(name: str, values: Tensor, dtype: torch.dtype) -> None:
    """KernelError unless `values` have that type, which the kernel reads without asking."""
    if values.dtype != dtype:
        raise KernelError(f"expert weights: '{name}' must be {dtype}, got {values.dtype}; convert it first")
