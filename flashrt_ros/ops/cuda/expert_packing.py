"""The expert's weights as its kernel streams them: in tiles of eight outputs, as bfloat16 or as codes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..shapes import check
from .expert_codes import (
    CHUNK,
    LACKING,
    RANKS,
    Codes,
    check_type,
    tiles_of_e4m3,
    tiles_of_nvfp4,
    values_of_e4m3,
    values_of_nvfp4,
)

WIDTH, HEADS, HEAD_DIM, HIDDEN, ACTIONS = 1024, 8, 256, 4096, 32  # what kernels/expert.cu is written for
INNER = HEADS * HEAD_DIM
TILE_BYTES = {16: 1024, 8: 512, 4: 288}
"""Bytes of a tile's part of a chunk of 64 inputs, for each number of bits of a weight."""


def pack_tiles(weight: Tensor) -> Tensor:
    """Reorder bf16[layers, outputs, inputs] into the tiles that the kernel streams.

    Result bf16[layers, ranks, chunks of 64 inputs, outputs / 8, 8, 8, 8]: a rank has an eighth of the inputs; a tile's
    part of a chunk is eight matrices, each of eight outputs by eight inputs.
    """
    layers, outputs, inputs = weight.shape
    view = weight.view(layers, outputs // 8, 8, RANKS, inputs // RANKS // CHUNK, CHUNK // 8, 8)
    return view.permute(0, 3, 4, 1, 5, 2, 6).contiguous()


def unpack_tiles(packed: Tensor) -> Tensor:
    """The weights bf16[layers, outputs, inputs] that `pack_tiles` made `packed` of."""
    layers, ranks, chunks, tiles = packed.shape[:4]
    return packed.permute(0, 3, 5, 1, 2, 4, 6).reshape(layers, 8 * tiles, ranks * chunks * CHUNK)


def tile_order(hidden: int) -> Tensor:
    """Order of 2 * hidden outputs, gate then up, in which tiles of eight alternate between them."""
    return torch.arange(2 * hidden).view(2, hidden // 8, 8).transpose(0, 1).flatten()


def rotary_pairs(heads: int) -> Tensor:
    """Order of the features of `heads` heads that puts i and i + 128 side by side."""
    half = HEAD_DIM // 2
    inside = torch.stack((torch.arange(half), torch.arange(half) + half), dim=1).flatten()
    return (torch.arange(heads)[:, None] * HEAD_DIM + inside).flatten()


@dataclass(frozen=True)
class Stream:
    """The weights of one product.

    Args:
        tiles: bf16 as of `pack_tiles`, or uint8[layers, ranks, chunks of 64 inputs, outputs / 8, bytes of codes].
        factor: float32[layers, outputs] that the kernel multiplies its sums of decoded codes by; None for bf16.
    """

    tiles: Tensor
    factor: Tensor | None = None

    @property
    def bits(self) -> int:
        """Of a weight: 16, 8 for E4M3, 4 for NVFP4."""
        if self.factor is None:
            return 16
        return 8 if self.tiles.shape[-1] == TILE_BYTES[8] else 4

    def matrix(self, layer: int) -> Tensor:
        """float32[outputs, inputs] that the weights of one layer stand for, outputs in the order of packing."""
        tiles = self.tiles[layer]
        if self.factor is None:
            return unpack_tiles(tiles[None])[0].float()
        values = values_of_e4m3(tiles) if self.bits == 8 else values_of_nvfp4(tiles)
        return values * (self.factor[layer, :, None] / LACKING[self.bits])


@dataclass(frozen=True)
class ExpertWeights:
    """All weights of the expert, as the kernel reads them (see `pack`).

    Args:
        project, output, gate_up, down: what the layers multiply by.
        enter_weight, enter_bias: float32[actions, width], float32[width].
        leave_weight, leave_bias: float32[width, actions], float32[actions]; both carry the step size.
    """

    project: Stream
    output: Stream
    gate_up: Stream
    down: Stream
    enter_weight: Tensor
    enter_bias: Tensor
    leave_weight: Tensor
    leave_bias: Tensor

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.project.tiles.shape[0]

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.project.tiles.device

    @property
    def streams(self) -> tuple[Stream, Stream, Stream, Stream]:
        """Those of the products, in the order of a layer."""
        return self.project, self.output, self.gate_up, self.down

    @property
    def bits(self) -> tuple[int, int, int, int]:
        """Of the weights of each product."""
        project, output, gate_up, down = (stream.bits for stream in self.streams)
        return project, output, gate_up, down


def pack(
    qkv: Tensor | Codes,
    output: Tensor | Codes,
    gate_up: Tensor | Codes,
    down: Tensor | Codes,
    enter: tuple[Tensor, Tensor],
    leave: tuple[Tensor, Tensor],
) -> ExpertWeights:
    """Pack plain weights: a stack of layers for each product, each [layers, outputs, inputs], bf16 or codes.

    Args:
        qkv: [layers, 2560, 1024], query, key, value.
        output: [layers, 1024, 2048].
        gate_up: [layers, 8192, 1024], all of gate, then all of up.
        down: [layers, 1024, 4096].
        enter: weight [1024, 32] and bias [1024] from actions to the expert.
        leave: weight [32, 1024] and bias [32] back, both multiplied by the step size already.

    Raises:
        ShapeError: one has another shape.
        KernelError: one has another type, or codes that are no numbers.
    """
    check(
        "expert weights",
        qkv=(_shaped(qkv), ("layers", INNER + 2 * HEAD_DIM, WIDTH)),
        output=(_shaped(output), ("layers", WIDTH, INNER)),
        gate_up=(_shaped(gate_up), ("layers", 2 * HIDDEN, WIDTH)),
        down=(_shaped(down), ("layers", WIDTH, HIDDEN)),
        enter=(enter[0], (WIDTH, ACTIONS)),
        leave=(leave[0], (ACTIONS, WIDTH)),
    )
    for name, matrix in (("qkv", qkv), ("output", output), ("gate_up", gate_up), ("down", down)):
        if isinstance(matrix, Codes):
            matrix.check(name)
        else:
            check_type(name, matrix, torch.bfloat16)
    rotated = rotary_pairs(HEADS + 1)
    return ExpertWeights(
        project=_stream(qkv, torch.cat((rotated, torch.arange(HEAD_DIM) + len(rotated)))),
        output=_stream(output),
        gate_up=_stream(gate_up, tile_order(HIDDEN)),
        down=_stream(down),
        enter_weight=enter[0].float().t().contiguous(),
        enter_bias=enter[1].float().contiguous(),
        leave_weight=leave[0].float().t().contiguous(),
        leave_bias=leave[1].float().contiguous(),
    )


def _shaped(matrix: Tensor | Codes) -> Tensor:
    """Something of the same shape, to be checked."""
    return torch.empty(matrix.shape, device="meta") if isinstance(matrix, Codes) else matrix


def _stream(matrix: Tensor | Codes, order: Tensor | None = None) -> Stream:
    """Packed, with outputs in `order`; what does not fit has been refused."""
    if isinstance(matrix, Tensor):
        return Stream(pack_tiles(matrix if order is None else matrix[:, order.to(matrix.device)]))
    codes = matrix if order is None else matrix.ordered(order.to(matrix.values.device))
    if codes.scales is None:
        return Stream(torch.stack([tiles_of_e4m3(values) for values in codes.values]), codes.factor * LACKING[8])
    tiles = [tiles_of_nvfp4(*layer) for layer in zip(codes.values, codes.scales, strict=True)]
    return Stream(torch.stack(tiles), codes.factor * LACKING[4])


def packed_bytes(bits: int, layers: int, outputs: int, inputs: int) -> int:
    """Bytes of the `Stream` of one product."""
    return layers * outputs * (inputs * TILE_BYTES[bits] // (8 * CHUNK) + (4 if bits < 16 else 0))
