"""A weight of one site in the format of its tier: packed codes, scales, and how its input is quantised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..contract import WIDE, SiteFormat
from ..ops.padding import Shape, in_padded_memory, padded_shape, with_padding
from . import e4m3, nvfp4
from .errors import PrecisionError

WEIGHTS = ("e4m3", "e4m3_tensor", "nvfp4")
"""Formats of weights: E4M3 with one scale an output, E4M3 with one scale a matrix, NVFP4."""

ACTIVATIONS = ("e4m3", "nvfp4")
"""Formats of activations: E4M3 under one calibrated scale; NVFP4 under a calibrated tensor scale, with the scales of
blocks taken from the values at hand."""


class PackedWeight(Tensor):
    """A matrix float[outputs, inputs] that is stored in `format`. Only ops that know the format can read it.

    It has shape, type and device of the matrix that it stands for, so that it takes that matrix's place in a policy's
    weights; any operation of PyTorch on it is refused, instead of reading what is not there.

    Attributes:
        site: name of the site, for messages.
        format: format of the weight, one of `WEIGHTS`.
        activation: format of the input, one of `ACTIVATIONS`, or "16-bit".
        codes: uint8[outputs, inputs] for E4M3; uint8[outputs, 8 * blocks] for NVFP4, two a byte.
        scales: float32[outputs] or float32[1] for E4M3; uint8[outputs, blocks] (codes of E4M3) for NVFP4.
        tensor_scale: float32[1] of NVFP4; None for E4M3.
        input_scale: float32[1] that the input is divided by; of the tensor for NVFP4; None for a 16-bit input.
        multiplier: float32[inputs] by which the producer of the input multiplies it before anything else; None where
            calibration left the input alone, or the norm in front holds it already.
        output_scales: float32[3] of the codes that the queries, keys and values become which the product makes; None
            where nobody wants codes of them.
    """

    site: str
    format: str
    activation: str
    codes: Tensor
    scales: Tensor
    tensor_scale: Tensor | None
    input_scale: Tensor | None
    multiplier: Tensor | None
    output_scales: Tensor | None

    @staticmethod
    def __new__(cls, matrix: Tensor, *_: Any, **__: Any) -> PackedWeight:
        """A stand-in of the shape, type and device of `matrix`, without storage."""
        make: Any = Tensor._make_wrapper_subclass
        stand_in: PackedWeight = make(cls, matrix.shape, dtype=matrix.dtype, device=matrix.device)
        return stand_in

    def __init__(
        self,
        matrix: Tensor,
        table: SiteFormat,
        input_scale: Tensor | None = None,
        multiplier: Tensor | None = None,
        *,
        padded: bool = False,
        output_scales: Tensor | None = None,
    ) -> None:
        """Quantise `matrix`, float[outputs, inputs], as `table` says; PrecisionError with the site's name if it
        cannot be. With `padded`, codes lie in memory where `with_zeros` finds room."""
        check_format(table)
        self.site, self.format, self.activation = table.name, table.weight, table.activation
        self.input_scale, self.multiplier, self.tensor_scale = input_scale, multiplier, None
        self.output_scales = output_scales
        if (input_scale is None) != (table.activation == WIDE):
            raise PrecisionError(f"site '{table.name}': {table.activation} activations need a calibrated scale")
        try:
            self._store(matrix)
        except PrecisionError as error:
            raise PrecisionError(f"site '{table.name}': {error}") from None
        shape = padded_shape(matrix.shape)
        if padded and matrix.shape != shape:
            self._place(shape, in_padded_memory)

    def _store(self, matrix: Tensor) -> None:
        if self.format == "nvfp4":
            stored = nvfp4.quantise_weight(matrix)
            self.codes, self.scales, self.tensor_scale = stored.packed, stored.scales, stored.tensor_scale
        else:
            self.codes, self.scales = e4m3.quantise_weight(matrix, by_channel=self.format == "e4m3")

    def _place(self, shape: Shape, place: Callable[[Tensor, Shape], Tensor]) -> None:
        """Let `place` put what is stored of each value, or each block of them, where a matrix of `shape` has it."""
        outputs, inputs = shape
        if self.format == "nvfp4":
            self.codes = place(self.codes, (outputs, inputs // 2))
            self.scales = place(self.scales, (outputs, inputs // nvfp4.BLOCK))
        else:
            self.codes = place(self.codes, shape)

    def with_zeros(self) -> PackedWeight:
        """The matrix with zeros behind its outputs and inputs, up to `padded_shape`, for who multiplies it: itself if
        that is its shape. Codes are not copied if they were packed with `padded`."""
        shape = padded_shape(self.shape)
        if self.shape == shape:
            return self
        wider = PackedWeight.__new__(PackedWeight, torch.empty((), dtype=self.dtype, device=self.device).expand(shape))
        wider.__dict__.update(self.__dict__)
        wider._place(shape, with_padding)
        if self.format == "e4m3":
            wider.scales = _with_ones(self.scales, shape[0])
        if self.multiplier is not None:
            wider.multiplier = _with_ones(self.multiplier, shape[1])
        return wider

    @property
    def stored_bytes(self) -> int:
        """Bytes of codes and scales."""
        parts = (self.codes, self.scales, self.tensor_scale, self.input_scale, self.multiplier)
        return sum(part.nbytes for part in parts if part is not None)

    def decode(self, rows: Tensor | None = None) -> Tensor:
        """float32[outputs, inputs] that the codes stand for, or float32[n, inputs] of the rows int[n]."""
        codes, scales = self.codes, self.scales
        if rows is not None:
            codes = codes.index_select(0, rows)
            scales = scales.index_select(0, rows) if len(scales) == self.shape[0] else scales
        if self.tensor_scale is not None:
            return nvfp4.Nvfp4(codes, scales, self.tensor_scale, self.shape[1]).decode()
        return e4m3.decode(codes) * scales[:, None]

    def quantised_input(self, x: Tensor) -> Tensor:
        """float32[rows, inputs]: the values that stand for `x`, float[rows, inputs], when it enters the product."""
        value = x.float() if self.multiplier is None else x.float() * self.multiplier
        if self.input_scale is None:
            return value.to(x.dtype).float()
        if self.activation == "nvfp4":
            return nvfp4.quantise(value, self.input_scale).decode()
        return e4m3.decode(e4m3.quantise(value, self.input_scale)) * self.input_scale

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        shape = "x".join(map(str, self.shape))
        return f"PackedWeight({self.site}, {shape}, weight {self.format}, activation {self.activation})"

    # Shape, type and device are plain attributes, and nothing else gets through below.
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse: nothing is stored behind the shape."""
        if func is torch.ops.aten.detach.default:  # what PyTorch calls on its own, without reading a value
            return args[0]
        sites = [str(arg) for arg in (*args, *(kwargs or {}).values()) if isinstance(arg, cls)]
        raise PrecisionError(
            f"{func} cannot read {', '.join(sites) or 'a packed weight'}: it is stored packed; "
            "use the ops of flashrt_ros.precision, or a kernel that knows the format"
        )


def _with_ones(values: Tensor, size: int) -> Tensor:
    return torch.cat((values, values.new_ones(size - len(values))))


def stored_bytes(table: SiteFormat, outputs: int, inputs: int) -> int:
    """Bytes of codes and scales of a matrix float[outputs, inputs] whose weight is not 16-bit."""
    own = 4 if table.activation != WIDE else 0  # the scale of the input
    if table.weight == "nvfp4":
        blocks = -(-inputs // nvfp4.BLOCK)
        return outputs * blocks * (nvfp4.BLOCK // 2 + 1) + 4 + own
    return outputs * inputs + 4 * (outputs if table.weight == "e4m3" else 1) + own


def check_format(table: SiteFormat) -> None:
    """PrecisionError if the formats of `table` don't exist or don't go together."""
    for kind, name, known in (("weight", table.weight, WEIGHTS), ("activation", table.activation, ACTIVATIONS)):
        if name not in (WIDE, *known):
            raise PrecisionError(
                f"site '{table.name}': unknown {kind} format '{name}'; there are: {', '.join((WIDE, *known))}"
            )
    if table.weight == WIDE and table.activation != WIDE:
        raise PrecisionError(
            f"site '{table.name}': {table.activation} activations cannot meet a 16-bit weight; "
            "give the weight a narrower format, or the activation 16-bit"
        )
    if table.activation == "nvfp4" and table.weight != "nvfp4":
        raise PrecisionError(
            f"site '{table.name}': nvfp4 activations cannot meet an {table.weight} weight; tensor cores multiply NVFP4 "
            "with NVFP4 only"
        )
