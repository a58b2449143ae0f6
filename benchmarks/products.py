"""Every product of π0.5's vision and prefix at its true size: the own kernel's variants beside cuBLASLt's.

Run: `python benchmarks/products.py` on a Hopper GPU (writes benchmarks/results/h200_products.json on an
H200). `--only SITE[,SITE]` measures a part and writes nothing. `--show` prints the table of a result, without a GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from _common import RESULTS, write_result
from _gpu import digests, distance, gpu, layer_us, result_name
from product_subjects import Product, Subject, products
from torch import Tensor

from flashrt_ros.measure.circumstances import significant
from flashrt_ros.measure.tables import table
from flashrt_ros.ops.cuda import gemm
from flashrt_ros.ops.cuda import rows as kernels
from flashrt_ros.ops.cuda.errors import KernelError
from flashrt_ros.ops.cuda.gemm import CODES
from flashrt_ros.ops.shapes import ShapeError

REPEATS = 12
NORM_LAUNCHES, NORM_PARTS = 30, (0, 1, 2, 3, 4, 7, 8)
OWN, TENSOR, OUTPUTS, BF16 = "own", "cublaslt_fp8_tensor", "cublaslt_fp8_outputs", "cublaslt_bf16"

PROTOCOL = (
    f"us: one layer of a CUDA graph that holds all layers with weights of their own and one input, median of {REPEATS} "
    "replays after 3, between device events. own: kernels/gemm.cu with overlap and with all that is behind the product "
    "inside (a factor for each output, bias, GELU or GeGLU, codes of the result); parts are not added. cuBLASLt's are "
    "the products alone, bf16 results: of codes with one scale (tensor), of codes with a scale for each output "
    "(outputs), of bfloat16 values with all their bits (bf16). error: distance of layer 0 from float64, relative; "
    "rounding_error: that of the float64 result, rounded once to what `own` stores. Codes of results have the scale "
    f"under which none saturates. norms: {NORM_LAUNCHES} launches over the same tensors in one graph."
)


@dataclass(frozen=True)
class Candidate:
    """One way to compute a product.

    Args:
        way: what the result file says of it.
        body: computes the layer of that number.
        error: distance of what `body(0)` left from float64.
    """

    way: dict[str, Any]
    body: Callable[[int], object]
    error: Callable[[], float]


def own_candidates(subject: Subject, processors: int) -> Iterator[Candidate]:
    """All variants of the own kernel."""
    for variant in subject.product.variants(processors):
        yield own_candidate(subject, variant)


def own_candidate(subject: Subject, variant: Mapping[str, int]) -> Candidate:
    """One variant of the own kernel."""
    product, parts, tile = subject.product, variant["parts"], variant["tile_rows"]
    padded = -(-product.rows // tile) * tile
    shape = (product.rows, product.results) if parts == 1 else (parts, padded, product.results)
    out = torch.empty(shape, device=subject.x.device, dtype=CODES if product.to_codes else torch.bfloat16)
    call = gemm.gate_up_geglu if product.behind == "geglu" else gemm.product
    choices = {name.upper(): value for name, value in variant.items() if name != "parts"}

    def body(layer: int) -> None:
        call(subject.x, subject.weights[layer], out=out, behind=subject.behind, overlap=True, variant=choices)

    def error() -> float:
        value = out.double() if parts == 1 else out[:, : product.rows].double().sum(0)
        scale = subject.behind.out_scale
        return distance(value if scale is None else value * scale.double(), subject.exact)

    return Candidate({"by": OWN, **variant}, body, error)


def library_candidates(subject: Subject) -> Iterator[Candidate]:
    """The bare product by cuBLASLt."""
    product, device = subject.product, subject.x.device
    out = torch.empty(product.rows, product.outputs, device=device, dtype=torch.bfloat16)
    if product.operands == "e4m3":
        yield from _scaled_candidates(subject, out)
        return
    yield Candidate(
        {"by": BF16},
        lambda layer: torch.mm(subject.x, subject.weights[layer].t(), out=out),
        lambda: distance(out, subject.sums),
    )


def _scaled_candidates(subject: Subject, out: Tensor) -> Iterator[Candidate]:
    x, weights, device = subject.x, subject.weights, subject.x.device
    one, ones, factor = torch.ones(1, device=device), torch.ones(len(x), 1, device=device), subject.behind.factor
    assert factor is not None  # operands are codes

    def scaled(layer: int, scales: tuple[Tensor, Tensor], fast: bool) -> None:
        torch._scaled_mm(x, weights[layer].t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=fast, out=out)

    for fast in (True, False):
        yield Candidate(
            {"by": TENSOR, "fast_accumulation": fast},
            lambda layer, fast=fast: scaled(layer, (one, one), fast),  # type: ignore[misc]
            lambda: distance(out, subject.sums),
        )
    yield Candidate(
        {"by": OUTPUTS, "fast_accumulation": True},
        lambda layer: scaled(layer, (ones, factor[None]), True),
        lambda: distance(out, subject.sums * factor.double()),
    )


def measured(candidate: Candidate, product: Product) -> dict[str, Any]:
    """Time and error of one candidate, or why it was refused."""
    try:
        us = layer_us(candidate.body, product.layers, REPEATS)
    except (KernelError, ShapeError) as error:
        return {**candidate.way, "refused": str(error).splitlines()[0]}
    candidate.body(0)
    torch.cuda.synchronize()
    tflops = 2 * product.rows * product.inputs * product.outputs / us / 1e6
    return {
        **candidate.way, "us": significant(us), "tflops": round(tflops), "error": significant(candidate.error(), 3),
    }  # fmt: skip


def measure_product(product: Product, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    """All candidates of one product, the fastest first; codes are measured beside full bfloat16 values."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    subject = Subject(product, device, generator)
    found = [measured(c, product) for c in (*own_candidates(subject, processors), *library_candidates(subject))]
    facts = {**facts_of(product, processors), "rounding_error": significant(subject.rounding_error(), 3)}
    if product.operands == "e4m3":
        del subject  # the bfloat16 weights take its memory
        wide = Product(product.site, product.rows, product.inputs, product.outputs, product.layers, "bf16")
        found += [measured(c, wide) for c in library_candidates(Subject(wide, device, generator))]
    return {**facts, "variants": sorted(found, key=lambda way: float(way.get("us", "inf")))}


def facts_of(product: Product, processors: int) -> dict[str, Any]:
    """Sizes of a product, and which variant is in use on a GPU of so many multiprocessors."""
    names = ("site", "rows", "inputs", "outputs", "layers", "operands", "behind", "bias")
    return {**{name: asdict(product)[name] for name in names}, "in_use": product.in_use(processors)}


def measure_norms(device: torch.device, generator: torch.Generator) -> Iterator[dict[str, Any]]:
    """What parts of K cost the norm behind them, and what quantising costs by itself."""
    for op, rows, width in (("residual_rms_norm", 712, 2048), ("layer_norm", 512, 1152)):
        for overlap in (False, True):
            subject = NormSubject(op, rows, width, overlap, device, generator)
            for parts in NORM_PARTS:
                us = layer_us(subject.norm(parts), NORM_LAUNCHES, REPEATS)
                yield {"op": op, **subject.facts, "parts": parts, "us": significant(us, 3)}
            us = layer_us(subject.quantise, NORM_LAUNCHES, REPEATS)
            yield {"op": "quantise", **subject.facts, "us": significant(us, 3)}


class NormSubject:
    """Operands of a norm that writes codes."""

    def __init__(
        self, op: str, rows: int, width: int, overlap: bool, device: torch.device, generator: torch.Generator
    ) -> None:
        self.facts = {"rows": rows, "width": width, "overlap": overlap}
        self._affine, self._overlap, self._device, self._generator = op == "layer_norm", overlap, device, generator
        self._x, self._weight, self._bias = self._wide(rows, width), self._wide(width), self._wide(width)
        self._out = torch.empty(rows, width, device=device, dtype=CODES)
        self._quantiser = kernels.Quantiser(torch.full((1,), 0.02, device=device))

    def _wide(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self._device, generator=self._generator).bfloat16()

    def norm(self, parts: int) -> Callable[[int], None]:
        """The norm behind a branch of that many parts."""
        branch = self._wide(parts, *self._x.shape) if parts else None
        out, how, overlap = self._out, self._quantiser, self._overlap

        def body(_: int) -> None:
            if self._affine:
                kernels.layer_norm(
                    self._x, self._weight, self._bias, eps=1e-6, out=out, branch=branch, quantiser=how, overlap=overlap
                )
            else:
                kernels.residual_rms_norm(self._x, branch, eps=1e-6, out=out, quantiser=how, overlap=overlap)

        return body

    def quantise(self, _: int) -> None:
        """The codes of the input."""
        kernels.quantise(self._x, self._quantiser, out=self._out, overlap=self._overlap)


def fastest(product: Mapping[str, Any], by: str, **choices: int | None) -> dict[str, Any] | None:
    """The fastest measured variant of a product that was computed by `by` with these choices; None without one."""
    found = [
        way
        for way in product["variants"]
        if way["by"] == by and "us" in way and all(way.get(name) == value for name, value in choices.items())
    ]
    return min(found, key=lambda way: float(way["us"])) if found else None


def shown(result: Mapping[str, Any]) -> str:
    """A result as tables: microseconds of each product, then of norms."""
    rows = []
    for product in result["products"]:
        used, best = product.get("in_use", {}), fastest(product, OWN) or {}
        own = (fastest(product, OWN, **used, stages=None) if used else None) or {}
        library = [(fastest(product, by) or {}).get("us") for by in (TENSOR, OUTPUTS, BF16)]
        rows.append((
            f"{product['site']} {product['operands']}", own.get("us"), used.get("tile_rows"), used.get("parts"),
            own.get("error"), product.get("rounding_error"), best.get("us"), *library,
        ))  # fmt: skip
    header = ("us", "in use", "tile", "parts", "error", "rounding", "own best", "fp8 tensor", "fp8 outputs", "bf16")
    norms = [(n["op"], n["rows"], n.get("parts"), "yes" if n["overlap"] else "no", n["us"]) for n in result["norms"]]
    return table(header, rows) + "\n\n" + table(("", "rows", "parts", "overlap", "us"), norms)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure everything and write the result, or only show one."""
    sites = {product.site: None for product in products()}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="sites with commas between; nothing is written then")
    parser.add_argument(
        "--show",
        type=Path,
        nargs="?",
        const=RESULTS / "h200_products.json",
        help="print a result (default: the H200's)",
    )
    args = parser.parse_args(arguments)
    only = args.only.split(",") if args.only else list(sites)
    unknown = [site for site in only if site not in sites]
    if unknown:
        parser.error(f"unknown site '{unknown[0]}'; there are: {', '.join(sites)}")
    if args.show is not None:
        print(shown(json.loads(args.show.read_text())))
        return
    device = gpu("products", gemm.unsuited)
    generator, name = torch.Generator(device).manual_seed(0), torch.cuda.get_device_name(device)
    found = [measure_product(product, device, generator) for product in products() if product.site in only]
    norms = [] if args.only else list(measure_norms(device, generator))
    sources = digests("gemm", "norms", "quantise")
    result = {"device": name, "sources": sources, "products": found, "norms": norms}
    if not args.only:
        write_result(result_name("products", name), result, PROTOCOL)
    print(shown(result))


if __name__ == "__main__":
    main()
