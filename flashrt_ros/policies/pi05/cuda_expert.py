"""How the expert's kernel gets each of its products: as bfloat16, or as codes that it decodes in registers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ...contract import WIDE, SiteFormat
from ...ops.cuda.expert_codes import Codes
from ...ops.cuda.expert_packing import FEW_ROWS, PRODUCTS, joined, pack_product, packed_bytes
from ...ops.cuda.expert_packing import ExpertWeights as PackedExpert
from ...ops.report import KernelReport
from ...precision.packed import PackedWeight
from .cuda_products import DECODED_ONCE, IN_REGISTERS
from .weights import ExpertWeights

_BITS = {WIDE: 16, "e4m3": 8, "e4m3_tensor": 8, "nvfp4": 4}


def common_bits(formats: Iterable[str]) -> int:
    """Bits of a weight of a product whose layers have these formats, as the kernel gets it: it reads all layers in one
    way, so that layers that differ are given to it as bfloat16."""
    found = {_BITS[name] for name in formats}
    return found.pop() if len(found) == 1 else _BITS[WIDE]


def pack_expert(weights: ExpertWeights, chunk: int) -> PackedExpert:
    """The expert for its kernel, for chunks as long as `chunk` rows.

    A stack of layers is as large as what is packed of it: no two are there at a time.
    """
    few_rows = chunk <= FEW_ROWS
    streams = {name: pack_product(name, _stacked(_of_layers(weights, name)), few_rows=few_rows) for name in PRODUCTS}
    enter, leave = weights.enter, weights.leave
    return joined(streams, (enter.weight, enter.bias), (leave.weight, leave.bias))


def expert_reports(weights: ExpertWeights) -> Iterator[KernelReport]:
    """Of the products with narrow weights."""
    for name in PRODUCTS:
        matrices = _of_layers(weights, name)
        narrow = [matrix for matrix in matrices if isinstance(matrix, PackedWeight)]
        if not narrow:
            continue
        formats = [_format(matrix) for matrix in matrices]
        if common_bits(formats) == _BITS[WIDE]:
            reason = (
                f"its layers are {' and '.join(dict.fromkeys(formats))}, the expert's kernel reads all layers in one "
                "way: codes were decoded when it was built"
            )
            yield KernelReport(f"expert.{name}", DECODED_ONCE, reason)
        else:
            rounded = dict.fromkeys(matrix.activation for matrix in narrow if matrix.activation != WIDE)
            reason = f"the expert's kernel takes 16-bit inputs: they are not rounded to {' or '.join(rounded)}"
            yield KernelReport(f"expert.{name}", IN_REGISTERS, reason if rounded else "")


def packed_expert_bytes(matrices: Mapping[str, Tensor], formats: Iterable[SiteFormat], layers: int) -> int:
    """Bytes of the products' copies that the kernel reads.

    Args:
        matrices: of every site, on any device.
        formats: of the sites that are narrow.
    """
    narrow = {item.name: item.weight for item in formats}
    total = 0
    for name in PRODUCTS:
        sites = [f"expert.{name}.{layer}" for layer in range(layers)]
        bits = common_bits(narrow.get(site, WIDE) for site in sites)
        total += packed_bytes(bits, layers, *matrices[sites[0]].shape)
    return total


def _of_layers(weights: ExpertWeights, name: str) -> tuple[Tensor, ...]:
    return tuple(getattr(layer, name) for layer in weights.layers)


def _format(matrix: Tensor) -> str:
    return matrix.format if isinstance(matrix, PackedWeight) else WIDE


def _stacked(matrices: Sequence[Tensor]) -> Tensor | Codes:
    """bf16[layers, outputs, inputs], or as codes."""
    packed = [matrix for matrix in matrices if isinstance(matrix, PackedWeight)]
    bits = common_bits(map(_format, matrices))
    if bits == _BITS[WIDE]:
        return torch.stack([_decoded(matrix) for matrix in matrices])
    values, factor = (torch.stack(parts) for parts in zip(*((m.codes, _factor(m)) for m in packed), strict=True))
    return Codes(values, factor, torch.stack([matrix.scales for matrix in packed]) if bits == 4 else None)


def _factor(matrix: PackedWeight) -> Tensor:
    """float32[outputs] behind the sums of decoded codes."""
    scale = matrix.scales if matrix.tensor_scale is None else matrix.tensor_scale
    return scale.expand(matrix.shape[0])


def _decoded(matrix: Tensor) -> Tensor:
    return matrix.decode().to(torch.bfloat16) if isinstance(matrix, PackedWeight) else matrix
