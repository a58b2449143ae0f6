"""How each site of vision and prefix is multiplied on a GPU. The one place that chooses, and says why.

| weight × activation | multiplied |
|---|---|
| 16-bit | cuBLASLt; on Hopper the sites of `OWN_WIDE` with `kernels/gemm.cu` |
| `e4m3`, `e4m3_tensor` × `e4m3` | `kernels/gemm.cu`, with all that follows inside; elsewhere cuBLASLt |
| `nvfp4` × `e4m3`; any narrow weight × 16-bit | decoded to bfloat16 a slice at a time, for `kernels/gemm.cu` |
| `nvfp4` × `nvfp4` | refused: no kernel |

Decoding is exact: the scales that bfloat16 would round stand behind the product.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from ...contract import WIDE
from ...ops.cuda import gemm
from ...ops.cuda import rows as kernels
from ...ops.cuda.errors import KernelError
from ...ops.cuda.gemm import CODES, Behind, Heads
from ...ops.cuda.rows import Quantiser
from ...precision.packed import PackedWeight

# Parts that K is cut into, which the norm behind the product adds: they fill the multiprocessors where outputs are few
# and K is long, but each is written and read once more. Measured on an H200 at 512 and 712 rows, norm included
# (docs/performance.md); tiles and the warpgroups that multiply follow from them (`gemm_tiling.tiling`).
PARTS_OF_K = {"vision.down": 3, "prefix.down": 4}
# 16-bit sites of vision that the own kernel multiplies, as measured in whole stages on an H200 (docs/performance.md):
# it begins beside the kernel in front, which cuBLASLt's do not.
OWN_WIDE = frozenset({"vision.output", "vision.qkv"})
CUBLASLT, CUBLASLT_FP8, OWN_FP8, DECODED = "cublaslt", "cublaslt_fp8", "fp8", "decoded"  # what a report says
OWN_BF16 = "bf16"
IN_REGISTERS, DECODED_ONCE = "decoded in registers", "decoded once"  # of the expert, by its kernel or in front of it
_MADE_BY_NORMS = ("qkv", "up", "gate_up")
_SLICE = 128  # outputs, of which a slice of decoded weights holds multiples


def kind_of(site: str) -> str:
    """Part and product of a site, without its layer: "prefix.down" of "prefix.down.3"."""
    return site.rsplit(".", maxsplit=1)[0]


def product_of(site: str, weight: Tensor, bias: Tensor | None, *, overlap: bool) -> Product:
    """The product for one site.

    Args:
        weight: bf16[outputs, inputs], or packed.
        bias: bf16[outputs].
        overlap: programmatic overlap of the launches; equal bits.

    Raises:
        KernelError: this GPU has no kernel for the site's formats; the message names the site.
    """
    if not isinstance(weight, PackedWeight):
        return WideProduct(weight, bias, overlap, is_own(kind_of(site), weight.device))
    kind, formats = kind_of(site), f"{weight.format} x {weight.activation}"
    unsuited = gemm.unsuited(weight.device)
    if weight.activation == "nvfp4":
        raise KernelError(f"site '{site}': no kernel multiplies {formats}")
    by_norm = kind.split(".")[1] in _MADE_BY_NORMS
    if weight.multiplier is not None and weight.activation != WIDE and not by_norm:
        raise KernelError(f"site '{site}': its input does not come from a norm, which could apply its multiplier")
    if weight.activation == "e4m3" and weight.format != "nvfp4":
        if unsuited:
            return LibraryProduct(weight, bias, overlap, unsuited)
        return CodesProduct(weight, bias, overlap, PARTS_OF_K.get(kind, 1))
    if unsuited:
        raise KernelError(f"site '{site}': {formats} is decoded for a kernel that this GPU lacks: {unsuited}")
    return DecodedProduct(weight, bias, overlap, f"no tensor cores take {formats}: weights are decoded each time")


def is_own(kind: str, device: torch.device) -> bool:
    """Whether the own kernel multiplies a 16-bit site; otherwise cuBLASLt does."""
    return kind in OWN_WIDE and not gemm.unsuited(device)


def owns_any(device: torch.device) -> bool:
    """Whether the own kernel multiplies some 16-bit site."""
    return bool(OWN_WIDE) and not gemm.unsuited(device)


def wide_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, out: Tensor, own: bool, overlap: bool, gelu: bool = False
) -> None:
    """out = x @ weight.T + bias of 16-bit operands, and gelu_tanh of it, with the float sums rounded once.

    Args:
        x: bf16[rows, inputs].
        weight: bf16[outputs, inputs].
        bias: bf16[outputs].
        out: bf16[rows, outputs].
        own: by the own kernel, otherwise by cuBLASLt.
        overlap: programmatic overlap of the launch, where the own kernel multiplies.
        gelu: with a bias only.

    Raises:
        KernelError: `gelu` without a bias.
    """
    if gelu and bias is None:
        raise KernelError("GELU behind a 16-bit product goes with a bias")
    if own:
        gemm.product(x, weight, out=out, behind=Behind(bias=bias, gelu=gelu), overlap=overlap)
    elif bias is None:
        torch.mm(x, weight.t(), out=out)
    elif gelu:
        torch._addmm_activation(bias, x, weight.t(), use_gelu=True, out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


class Product:
    """One site: x @ weight.T + bias. `spare` is bfloat16 memory, in one dimension, that nothing else uses meanwhile.

    Attributes:
        quantiser: how `x` has to be quantised by who makes it; None where it stays bfloat16.
        way: how it is multiplied, for the report.
        reason: why not in a faster way.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, overlap: bool, way: str, reason: str = "") -> None:
        self.weight, self.bias, self.overlap, self.way, self.reason = weight, bias, overlap, way, reason
        self.outputs, self.inputs = weight.shape
        self.quantiser = input_quantiser(weight)

    def linear(self, x: Tensor, out: Tensor, spare: Tensor) -> None:
        """Write the product to `out`, bf16[rows, outputs]."""
        raise NotImplementedError

    def heads(self, x: Tensor, qkv: Tensor, heads: Heads, spare: Tensor) -> None:
        """Write the product as `heads`, queries and keys rotated. `qkv` bf16[rows, outputs] is memory for it, in which
        the queries may lie."""
        self.linear(x, qkv, spare)
        kernels.split_rope_write(
            qkv, heads.rope, query=heads.query, key=heads.key, value=heads.value, overlap=self.overlap
        )

    def branch(self, x: Tensor, spare: Tensor) -> Tensor:
        """The product in `spare`, as a norm takes it: bf16[rows, outputs], or bf16[parts, at least rows, outputs]."""
        out, rest = carve(spare, x.shape[0], self.outputs)
        self.linear(x, out, rest)
        return out

    def gelu(self, x: Tensor, hidden: Tensor, spare: Tensor, then: Quantiser | None) -> Tensor:
        """gelu_tanh of the product, in `hidden`, bf16[rows, outputs], or as codes where `then` wants them."""
        self.linear(x, hidden, spare)
        torch.ops.aten.gelu_(hidden, approximate="tanh")
        return quantised(hidden, then, self.overlap)

    def geglu(self, x: Tensor, hidden: Tensor, spare: Tensor, then: Quantiser | None) -> Tensor:
        """gelu_tanh(gate) * up of the product, in `hidden`, bf16[rows, outputs / 2], or as codes likewise."""
        gate_up, rest = carve(spare, x.shape[0], self.outputs)
        self.linear(x, gate_up, rest)
        kernels.geglu(gate_up, out=hidden, overlap=self.overlap)
        return quantised(hidden, then, self.overlap)


class WideProduct(Product):
    """16-bit operands, through cuBLASLt or the own kernel."""

    def __init__(self, weight: Tensor, bias: Tensor | None, overlap: bool, own: bool) -> None:
        super().__init__(weight, bias, overlap, OWN_BF16 if own else CUBLASLT)
        self._own = own

    def linear(self, x: Tensor, out: Tensor, spare: Tensor) -> None:
        """See `Product`."""
        wide_linear(x, self.weight, self.bias, out=out, own=self._own, overlap=self.overlap)

    def gelu(self, x: Tensor, hidden: Tensor, spare: Tensor, then: Quantiser | None) -> Tensor:
        """See `Product`."""
        if self.bias is None:
            return super().gelu(x, hidden, spare, then)
        wide_linear(x, self.weight, self.bias, out=hidden, own=self._own, overlap=self.overlap, gelu=True)
        return quantised(hidden, then, self.overlap)


class PackedProduct(Product):
    """A packed weight. `factor` float32[outputs] holds every scale that stands behind the product."""

    def __init__(self, weight: PackedWeight, bias: Tensor | None, overlap: bool, way: str, reason: str = "") -> None:
        super().__init__(weight, bias, overlap, way, reason)
        self.packed = weight
        scales = weight.scales if weight.tensor_scale is None else weight.tensor_scale
        factor = scales if weight.input_scale is None else scales * weight.input_scale
        self.factor = factor.expand(self.outputs).contiguous()


class LibraryProduct(PackedProduct):
    """FP8 codes through cuBLASLt, with a scale for each output."""

    def __init__(self, weight: PackedWeight, bias: Tensor | None, overlap: bool, reason: str) -> None:
        super().__init__(weight, bias, overlap, CUBLASLT_FP8, reason)
        self._codes = weight.codes.view(CODES).t()

    def linear(self, x: Tensor, out: Tensor, spare: Tensor) -> None:
        """See `Product`."""
        rows = ones(x.shape[0], x.device)
        torch._scaled_mm(
            x, self._codes, rows, self.factor[None], bias=self.bias, out_dtype=torch.bfloat16, use_fast_accum=True,
            out=out,
        )  # fmt: skip


class CodesProduct(PackedProduct):
    """FP8 codes through `kernels/gemm.cu`, with everything that follows inside."""

    def __init__(self, weight: PackedWeight, bias: Tensor | None, overlap: bool, parts: int) -> None:
        super().__init__(weight, bias, overlap, OWN_FP8 if parts == 1 else f"{OWN_FP8}, {parts} parts")
        self._codes, self._parts = weight.codes.view(CODES), parts

    @property
    def head_scales(self) -> Tensor | None:
        """float32[3], where queries, keys and values shall become codes too; see `Heads`."""
        return self.packed.output_scales

    def _behind(self, *, gelu: bool = False, then: Quantiser | None = None) -> Behind:
        return Behind(factor=self.factor, bias=self.bias, gelu=gelu, out_scale=None if then is None else then.scale)

    def linear(self, x: Tensor, out: Tensor, spare: Tensor) -> None:
        """See `Product`."""
        gemm.product(x, self._codes, out=out, behind=self._behind(), overlap=self.overlap)

    def heads(self, x: Tensor, qkv: Tensor, heads: Heads, spare: Tensor) -> None:
        """See `Product`; nothing of `qkv` is written but the queries that lie in it."""
        gemm.rotated_qkv(x, self._codes, heads, behind=self._behind(), overlap=self.overlap)

    def branch(self, x: Tensor, spare: Tensor) -> Tensor:
        """See `Product`."""
        if self._parts == 1:
            return super().branch(x, spare)
        rows = gemm.parts_rows(x.shape[0], self.outputs, self._parts, x.device)
        out = carve(spare, self._parts * rows, self.outputs)[0].view(self._parts, rows, self.outputs)
        gemm.product(x, self._codes, out=out, behind=self._behind(), overlap=self.overlap)
        return out

    def gelu(self, x: Tensor, hidden: Tensor, spare: Tensor, then: Quantiser | None) -> Tensor:
        """See `Product`."""
        out, behind = _target(hidden, then), self._behind(gelu=True, then=then)
        gemm.product(x, self._codes, out=out, behind=behind, overlap=self.overlap)
        return out

    def geglu(self, x: Tensor, hidden: Tensor, spare: Tensor, then: Quantiser | None) -> Tensor:
        """See `Product`."""
        out, behind = _target(hidden, then), self._behind(then=then)
        gemm.gate_up_geglu(x, self._codes, out=out, behind=behind, overlap=self.overlap)
        return out


class DecodedProduct(PackedProduct):
    """A weight that is decoded to bfloat16 in front of the product: as many outputs at a time as `spare` has room for,
    so that nothing is stored twice. Codes that come in are made bfloat16 too."""

    def __init__(self, weight: PackedWeight, bias: Tensor | None, overlap: bool, reason: str) -> None:
        super().__init__(weight, bias, overlap, DECODED, reason)

    def linear(self, x: Tensor, out: Tensor, spare: Tensor) -> None:
        """See `Product`."""
        self._multiply(x, out, spare, gelu=False)

    def gelu(self, x: Tensor, hidden: Tensor, spare: Tensor, then: Quantiser | None) -> Tensor:
        """See `Product`."""
        self._multiply(x, hidden, spare, gelu=True)
        return quantised(hidden, then, self.overlap)

    def _multiply(self, x: Tensor, out: Tensor, spare: Tensor, *, gelu: bool) -> None:
        x = self._wide_input(x)
        for rows in self._slices(self.outputs, spare, ways=1):
            weight = carve(spare, rows.stop - rows.start, self.inputs)[0]
            self._decode(rows, weight)
            behind = Behind(factor=self.factor[rows], bias=None if self.bias is None else self.bias[rows], gelu=gelu)
            # Without overlap: the weights are made by the kernel in front.
            gemm.product(x, weight, out=out[:, rows], behind=behind)

    def geglu(self, x: Tensor, hidden: Tensor, spare: Tensor, then: Quantiser | None) -> Tensor:
        """See `Product`."""
        x, half = self._wide_input(x), self.outputs // 2
        for gates in self._slices(half, spare, ways=2):
            ups, count = slice(gates.start + half, gates.stop + half), gates.stop - gates.start
            weight = carve(spare, 2 * count, self.inputs)[0]
            self._decode(gates, weight[:count])
            self._decode(ups, weight[count:])
            factor = torch.cat((self.factor[gates], self.factor[ups]))
            gemm.gate_up_geglu(x, weight, out=hidden[:, gates], behind=Behind(factor=factor))
        return quantised(hidden, then, self.overlap)

    def _slices(self, outputs: int, spare: Tensor, ways: int) -> Iterator[slice]:
        """Outputs of which `spare` holds `ways` rows of weights each."""
        most = spare.numel() // (self.inputs * ways) // _SLICE * _SLICE
        if most == 0:
            raise KernelError(f"no room to decode {_SLICE} outputs of {self.inputs} inputs in {spare.numel()} values")
        return (slice(first, min(first + most, outputs)) for first in range(0, outputs, most))

    def _decode(self, rows: slice, out: Tensor) -> None:
        packed = self.packed
        if packed.tensor_scale is None:
            out.copy_(packed.codes[rows].view(CODES))
        else:
            kernels.decode_nvfp4(packed.codes[rows], packed.scales[rows], out=out)

    def _wide_input(self, x: Tensor) -> Tensor:
        if x.dtype == CODES:
            return x.to(torch.bfloat16)
        return x if self.packed.multiplier is None else (x * self.packed.multiplier).to(torch.bfloat16)


def input_quantiser(weight: Tensor) -> Quantiser | None:
    """How the input of a site is quantised by who makes it; None for a 16-bit input."""
    if not isinstance(weight, PackedWeight) or weight.activation == WIDE:
        return None
    if weight.input_scale is None:
        raise KernelError(f"site '{weight.site}': {weight.activation} activations without a scale")
    return Quantiser(weight.input_scale, weight.multiplier)


def quantised(x: Tensor, how: Quantiser | None, overlap: bool) -> Tensor:
    """`x`, bf16[rows, width], or its codes where the product behind it wants them."""
    if how is None:
        return x
    codes = torch.empty(x.shape, dtype=CODES, device=x.device)
    kernels.quantise(x, how, out=codes, overlap=overlap)
    return codes


def as_codes(buffer: Tensor) -> Tensor:
    """The first half of bf16[rows, width], contiguous, as E4M3 codes [rows, width]."""
    return buffer.flatten().view(CODES)[: buffer.numel()].view(buffer.shape)


def _target(hidden: Tensor, then: Quantiser | None) -> Tensor:
    return hidden if then is None else as_codes(hidden)


def carve(spare: Tensor, rows: int, width: int) -> tuple[Tensor, Tensor]:
    """[rows, width] from the beginning of `spare`, and what is left; KernelError if it is too small."""
    count = rows * width
    if count > spare.numel():
        raise KernelError(f"{rows} rows of {width} find no room in {spare.numel()} spare values")
    return spare[:count].view(rows, width), spare[count:]


@lru_cache(maxsize=32)
def ones(rows: int, device: torch.device) -> Tensor:
    """float32[rows, 1]."""
    return torch.ones(rows, 1, device=device)
