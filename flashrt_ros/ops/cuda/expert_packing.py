"""The expert's weights as its kernel streams them: in tiles of eight outputs, as bfloat16 or as codes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..shapes import check
from .expert_codes import (
    CHUNK,
    LACKING,
    RANKS,
    SHARE_TILES,
    Codes,
    check_type,
    share_of_nvfp4,
    share_order,
    tiles_of_e4m3,
    tiles_of_nvfp4,
    values_of_e4m3,
    values_of_nvfp4,
    values_of_nvfp4_share,
    weight_of_share,
)

WIDTH, HEADS, HEAD_DIM, HIDDEN, ACTIONS = 1024, 8, 256, 4096, 32  # what kernels/expert.cu is written for
INNER = HEADS * HEAD_DIM
FEW_ROWS = 16  # of a chunk, at most, for which `down` is packed in an order of its own (see kernels/expert_hidden.cuh)
PRODUCTS = {
    "qkv": (INNER + 2 * HEAD_DIM, WIDTH),
    "output": (WIDTH, INNER),
    "gate_up": (2 * HIDDEN, WIDTH),
    "down": (WIDTH, HIDDEN),
}
"""Outputs and inputs of each product of a layer, in their order."""
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
        tiles: bf16 as of `pack_tiles`, or uint8[layers, ranks, chunks of 64 inputs, outputs / 8, bytes of codes]; of
            `down` for few rows those of its matrix in `share_order`.
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

    @property
    def for_few_rows(self) -> bool:
        """Whether this is `down` as few rows want it."""
        return self.tiles.shape[3] == SHARE_TILES

    def matrix(self, layer: int) -> Tensor:
        """float32[outputs, inputs] that the weights of one layer stand for, outputs in the order of packing."""
        values = self._values(self.tiles[layer])
        return values if self.factor is None else values * (self.factor[layer, :, None] / LACKING[self.bits])

    def _values(self, tiles: Tensor) -> Tensor:
        """What the tiles of a layer stand for without factors."""
        if self.bits == 4:
            return values_of_nvfp4_share(tiles, WIDTH) if self.for_few_rows else values_of_nvfp4(tiles)
        values = values_of_e4m3(tiles) if self.bits == 8 else unpack_tiles(tiles[None])[0].float()
        return weight_of_share(values, WIDTH) if self.for_few_rows else values


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
    *,
    few_rows: bool,
) -> ExpertWeights:
    """Pack plain weights: a stack of layers for each product (see `pack_product`), and both ends (see `joined`).

    Args:
        few_rows: for chunks of at most FEW_ROWS rows, whose kernel wants `down` in another order; otherwise for longer
            ones.

    Raises:
        ShapeError: one has another shape.
        KernelError: one has another type, or codes that are no numbers.
    """
    stacks = {"qkv": qkv, "output": output, "gate_up": gate_up, "down": down}
    shapes = {name: (_shaped(stack), ("layers", *PRODUCTS[name])) for name, stack in stacks.items()}
    check("expert weights", **shapes)
    return joined({name: pack_product(name, stack, few_rows=few_rows) for name, stack in stacks.items()}, enter, leave)


def pack_product(name: str, stack: Tensor | Codes, *, few_rows: bool) -> Stream:
    """Pack all layers of one product: [layers, outputs, inputs], bf16 or codes. Raises as `pack` does.

    Args:
        name: of PRODUCTS.
        stack: outputs in the order query, key, value, or all of gate, then all of up.
        few_rows: see `pack`.
    """
    check("expert weights", **{name: (_shaped(stack), ("layers", *PRODUCTS[name]))})
    if isinstance(stack, Codes):
        stack.check(name)
    else:
        check_type(name, stack, torch.bfloat16)
    if name == "down" and few_rows:
        return _share_stream(stack)
    if isinstance(stack, Codes):
        return _narrow_stream(stack, _order(name, stack.values.device))
    order = _order(name, stack.device)
    return Stream(_layer_by_layer(len(stack), lambda layer: pack_tiles(_ordered(stack[layer], order)[None])[0]))


def joined(streams: Mapping[str, Stream], enter: tuple[Tensor, Tensor], leave: tuple[Tensor, Tensor]) -> ExpertWeights:
    """All weights of the expert: each of PRODUCTS, and both ends. Raises ShapeError if an end has another shape.

    Args:
        enter: weight [1024, 32] and bias [1024] from actions to the expert.
        leave: weight [32, 1024] and bias [32] back, both multiplied by the step size already.
    """
    check("expert weights", enter=(enter[0], (WIDTH, ACTIONS)), leave=(leave[0], (ACTIONS, WIDTH)))
    return ExpertWeights(
        project=streams["qkv"],
        output=streams["output"],
        gate_up=streams["gate_up"],
        down=streams["down"],
        enter_weight=enter[0].float().t().contiguous(),
        enter_bias=enter[1].float().contiguous(),
        leave_weight=leave[0].float().t().contiguous(),
        leave_bias=leave[1].float().contiguous(),
    )


def _shaped(matrix: Tensor | Codes) -> Tensor:
    """Something of the same shape, to be checked."""
    return torch.empty(matrix.shape, device="meta") if isinstance(matrix, Codes) else matrix


def _order(name: str, device: torch.device) -> Tensor | None:
    """In which the outputs of a product are packed; None for the order that they have."""
    if name == "qkv":
        rotated = rotary_pairs(HEADS + 1)
        return torch.cat((rotated, torch.arange(HEAD_DIM) + len(rotated))).to(device)
    return tile_order(HIDDEN).to(device) if name == "gate_up" else None


def _ordered(outputs: Tensor, order: Tensor | None) -> Tensor:
    return outputs if order is None else outputs[order]


def _narrow_stream(codes: Codes, order: Tensor | None) -> Stream:
    """Packed, with outputs in `order`; what does not fit has been refused."""

    def tiles(layer: int) -> Tensor:
        values = _ordered(codes.values[layer], order)
        return (
            tiles_of_e4m3(values)
            if codes.scales is None
            else tiles_of_nvfp4(values, _ordered(codes.scales[layer], order))
        )

    factor = codes.factor if order is None else codes.factor[:, order]
    return Stream(_layer_by_layer(len(codes.values), tiles), factor * LACKING[8 if codes.scales is None else 4])


def _share_stream(stack: Tensor | Codes) -> Stream:
    """`down` as few rows want it (see `share_order`); what does not fit has been refused."""
    if not isinstance(stack, Codes):
        return Stream(_layer_by_layer(len(stack), lambda layer: pack_tiles(share_order(stack[layer])[None])[0]))
    values, scales = stack.values, stack.scales
    if scales is None:
        tiles = _layer_by_layer(len(values), lambda layer: tiles_of_e4m3(share_order(values[layer])))
        return Stream(tiles, stack.factor * LACKING[8])
    tiles = _layer_by_layer(len(values), lambda layer: share_of_nvfp4(values[layer], scales[layer]))
    return Stream(tiles, stack.factor * LACKING[4])


def _layer_by_layer(layers: int, make: Callable[[int], Tensor]) -> Tensor:
    """What `make` gives for each layer, in one tensor: no more than one of them is there beside it."""
    first = make(0)
    whole = first.new_empty(layers, *first.shape)
    whole[0] = first
    for layer in range(1, layers):
        whole[layer] = make(layer)
    return whole


def packed_bytes(bits: int, layers: int, outputs: int, inputs: int) -> int:
    """Bytes of the `Stream` of one product."""
    return layers * outputs * (inputs * TILE_BYTES[bits] // (8 * CHUNK) + (4 if bits < 16 else 0))
