"""Queries, keys and values as E4M3 codes, in the order in which the prefix's attention multiplies them.

Its instructions want the inner dimension of a product along the rows of both operands. For the second product that
dimension is the keys: so values lie as rows of one dimension each. And what a thread gets of the scores are, of 16
keys, two neighbours and the two that lie 8 further, while the next product wants four neighbours from it: so keys lie
in an order in which those are neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..shapes import check
from .boundary import demand_dense, demand_device
from .rows import CODES

HEADS, HEAD_DIM = 8, 256
PERMUTED = 16  # keys whose order changes
VALUE_KEYS = 64  # keys of a row of values


@dataclass(frozen=True)
class HeadCodes:
    """One layer's queries, keys and values; a code times its scale is the value.

    Args:
        query: codes[rows, 8, 256], contiguous.
        key: codes[rows in whole sixteens, 256]; key 16 g + 4 q + i is row 16 g + 8 (i // 2) + 2 q + i % 2.
        value: codes[whole sixty-fours of rows, 256, 64]: of so many keys, a row of each dimension.
        scales: float32[3], of queries, keys and values.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scales: Tensor

    @classmethod
    def allocate(cls, rows: int, scales: Tensor) -> HeadCodes:
        """Memory for so many rows, on the device of `scales`."""

        def codes(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.uint8, device=scales.device).view(CODES)

        key = codes(_whole(rows, PERMUTED) * PERMUTED, HEAD_DIM)
        value = codes(_whole(rows, VALUE_KEYS), HEAD_DIM, VALUE_KEYS)
        return cls(codes(rows, HEADS, HEAD_DIM), key, value, scales)

    def first(self, rows: int, scales: Tensor) -> HeadCodes:
        """The memory of the first rows, for a layer with these scales."""
        key, value = self.key[: _whole(rows, PERMUTED) * PERMUTED], self.value[: _whole(rows, VALUE_KEYS)]
        return HeadCodes(self.query[:rows], key, value, scales)

    def demand(self, op: str, rows: int, device: torch.device) -> None:
        """KernelError or ShapeError unless everything is as described, for so many rows, and on `device`."""
        codes = {"query_codes": self.query, "key_codes": self.key, "value_codes": self.value}
        shapes = (
            (rows, HEADS, HEAD_DIM),
            (_whole(rows, PERMUTED) * PERMUTED, HEAD_DIM),
            (_whole(rows, VALUE_KEYS), HEAD_DIM, VALUE_KEYS),
        )
        for (name, tensor), shape in zip(codes.items(), shapes, strict=True):
            check(op, **{name: (tensor, shape)})
        check(op, scales=(self.scales, (3,)))
        demand_dense(op, CODES, query_codes=self.query, key_codes=self.key, value_codes=self.value)
        demand_dense(op, torch.float32, alignment=4, scales=self.scales)
        for name, tensor in {**codes, "scales": self.scales}.items():
            demand_device(f"{op}: '{name}'", tensor, device)


def places(rows: int) -> Tensor:
    """int64[rows]: the row of `HeadCodes.key` that each key is in."""
    row = torch.arange(rows)
    quad, four = row % PERMUTED // 4, row % 4
    return row // PERMUTED * PERMUTED + four // 2 * 8 + 2 * quad + four % 2


def keys_in_order(key: Tensor, rows: int) -> Tensor:
    """codes[rows, 256] of `HeadCodes.key`."""
    return key.view(torch.uint8)[places(rows).to(key.device)].view(CODES)


def values_in_order(value: Tensor, rows: int) -> Tensor:
    """codes[rows, 256] of `HeadCodes.value`."""
    return value.view(torch.uint8).transpose(1, 2).reshape(-1, HEAD_DIM)[:rows].contiguous().view(CODES)


def arranged(query: Tensor, key: Tensor, value: Tensor, scales: Tensor) -> HeadCodes:
    """What a kernel would have written.

    Args:
        query: codes[rows, 8, 256].
        key, value: codes[rows, 256].
    """
    rows = query.shape[0]
    made = HeadCodes.allocate(rows, scales)
    made.query.copy_(query)
    made.key.view(torch.uint8)[places(rows).to(key.device)] = key.view(torch.uint8)
    padded = torch.zeros(made.value.shape[0] * VALUE_KEYS, HEAD_DIM, dtype=torch.uint8, device=value.device)
    padded[:rows] = value.view(torch.uint8)
    made.value.view(torch.uint8).copy_(padded.view(-1, VALUE_KEYS, HEAD_DIM).transpose(1, 2))
    return made


def _whole(rows: int, size: int) -> int:
    return -(-rows // size)
