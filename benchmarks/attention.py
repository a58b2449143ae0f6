"""The attentions of π0.5's vision and prefix at their true sizes: the own kernels and their variants beside PyTorch's.

Run: `python benchmarks/attention.py` on a Hopper GPU (writes benchmarks/results/h200_attention.json on an
H200). `--only image[,prefix]` measures a part and writes nothing. `--show` prints the table of a result, without a GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _common import RESULTS, write_result
from _gpu import digests, distance, gpu, layer_us, result_name
from torch import Tensor

from flashrt_ros.measure.circumstances import significant
from flashrt_ros.measure.tables import table
from flashrt_ros.ops import attention as reference
from flashrt_ros.ops.cuda import attention as library
from flashrt_ros.ops.cuda.errors import KernelError
from flashrt_ros.ops.cuda.head_codes import HeadCodes, arranged
from flashrt_ros.ops.cuda.image_attention import image_attention
from flashrt_ros.ops.cuda.prefix_attention import prefix_attention, prefix_attention_of_codes, unsuited
from flashrt_ros.ops.cuda.rows import CODES, Quantiser, quantise
from flashrt_ros.precision import e4m3

TOKENS, IMAGE_HEADS, IMAGE_DIM = 256, 16, 72
HEADS, HEAD_DIM = 8, 256
COMMITTED = RESULTS / "h200_attention.json"
LAYERS, REPEATS = {"image": 27, "prefix": 17}, 12
SIZES = {"image": (2, 3), "prefix": (712, 968)}  # images; rows
LIBRARY, OWN, LIBRARY_CODES, OWN_CODES = "PyTorch", "own", "PyTorch, then codes", "own, codes inside"
CODED = "own, of codes"
SOURCES = {"image": ("image_attention", "image_attention_wgmma"), "prefix": ("prefix_attention",)}
VARIANTS: dict[str, tuple[dict[str, int], ...]] = {
    "image": ({"CLUSTER": 1}, {"VALUE_LINE": 128}, {"VALUE_PIECES": 2}, {"WARPGROUPS": 1}, {"WARPGROUPS": 0}),
    "prefix": (),
}

PROTOCOL = (
    f"us: one layer of a CUDA graph that holds all layers ({LAYERS['image']} of vision, {LAYERS['prefix']} of the "
    f"prefix) with inputs of their own, median of {REPEATS} replays after 3, between device events. PyTorch: what runs "
    "without the own kernels (cuDNN for images, FlashAttention with a length on the device for the prefix), then "
    "codes: with quantise behind it. own: without early launch; of codes: queries, keys and values are "
    "E4M3, and so is the result. distance: of layer 0 from float32 of the bfloat16 inputs, relative."
)


@dataclass(frozen=True)
class Candidate:
    """One way to compute an attention.

    Args:
        name, variant: what the result says of it.
        body: computes the layer of that number into `result`.
        result: bf16 or codes [rows, width].
    """

    name: str
    variant: Mapping[str, int]
    body: Callable[[int], object]
    result: Tensor


class Images:
    """Vision's attention within each of some images."""

    def __init__(self, images: int, device: torch.device) -> None:
        self.images, self.layers = images, LAYERS["image"]
        rows, width = images * TOKENS, IMAGE_HEADS * IMAGE_DIM
        self.inputs = [torch.randn(rows, 3 * width, device=device).bfloat16() for _ in range(self.layers)]
        self.out = torch.empty(rows, width, device=device, dtype=torch.bfloat16)

    def expected(self) -> Tensor:
        """float32 result of layer 0."""
        out = self.out.float()
        reference.image_attention(self.inputs[0].float(), images=self.images, heads=IMAGE_HEADS, out=out)
        return out

    def library(self, layer: int) -> Tensor:
        """PyTorch's."""
        return library.image_attention(self.inputs[layer], images=self.images, heads=IMAGE_HEADS)

    def own(self, layer: int, out: Tensor, quantiser: Quantiser | None, variant: Mapping[str, int]) -> None:
        """The own kernel."""
        image_attention(
            self.inputs[layer], images=self.images, heads=IMAGE_HEADS, out=out, quantiser=quantiser, variant=variant
        )


class Prefix:
    """The prefix's attention of some rows to all of them."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.layers, self._library = LAYERS["prefix"], library.PrefixAttention(rows, device)

        def drawn(*shape: int) -> list[Tensor]:
            return [torch.randn(*shape, device=device).bfloat16() for _ in range(self.layers)]

        packed = drawn(rows, (HEADS + 2) * HEAD_DIM)  # queries are a part of each row
        self._queries = [x[:, : HEADS * HEAD_DIM].view(rows, HEADS, HEAD_DIM) for x in packed]
        self._keys, self._values = drawn(rows, 1, HEAD_DIM), drawn(rows, 1, HEAD_DIM)
        self._valid = torch.tensor([rows], dtype=torch.int32, device=device)
        self._library.set_valid(self._valid)
        self._codes: list[HeadCodes] = []
        self.out = torch.empty(rows, HEADS * HEAD_DIM, device=device, dtype=torch.bfloat16)

    def expected(self) -> Tensor:
        """float32 result of layer 0."""
        query, key, value = (x[0].float() for x in (self._queries, self._keys, self._values))
        out = self.out.float()
        reference.prefix_attention(query, key, value, self._valid, out=out)
        return out

    def library(self, layer: int) -> Tensor:
        """PyTorch's."""
        return self._library(self._queries[layer], self._keys[layer], self._values[layer])

    def own(self, layer: int, out: Tensor, quantiser: Quantiser | None, variant: Mapping[str, int]) -> None:
        """The own kernel."""
        prefix_attention(
            self._queries[layer], self._keys[layer], self._values[layer], self._valid, out=out, quantiser=quantiser,
            variant=variant,
        )  # fmt: skip

    def of_codes(self, layer: int, out: Tensor, quantiser: Quantiser) -> None:
        """The own kernel with codes of everything."""
        if not self._codes:
            self._codes = [coded(*heads) for heads in zip(self._queries, self._keys, self._values, strict=True)]
        prefix_attention_of_codes(self._codes[layer], self._valid, out=out, quantiser=quantiser)


def coded(query: Tensor, key: Tensor, value: Tensor) -> HeadCodes:
    """E4M3 codes of one layer's heads, each under the scale of its largest value."""
    scales = torch.stack([e4m3.scale_for(x.abs().amax()) for x in (query, key, value)]).flatten()
    query, key, value = (e4m3.quantise(x, s).view(CODES) for x, s in zip((query, key, value), scales, strict=True))
    return arranged(query, key.flatten(1), value.flatten(1), scales)


def candidates(subject: Images | Prefix, kind: str) -> Iterator[Candidate]:
    """The library's way, the own kernel's, both with codes behind, then the own kernel's variants."""
    out, codes = subject.out, subject.out.to(CODES)
    quantiser = Quantiser(torch.full((1,), 1 / 64, device=out.device))
    empty: dict[str, int] = {}

    def library_codes(layer: int) -> None:
        quantise(subject.library(layer), quantiser, out=codes, overlap=True)

    yield Candidate(LIBRARY, empty, subject.library, out)
    yield Candidate(LIBRARY_CODES, empty, library_codes, codes)
    for variant in (empty, *VARIANTS[kind]):
        yield Candidate(OWN, variant, lambda layer, v=variant: subject.own(layer, out, None, v), out)  # type: ignore[misc]
    yield Candidate(OWN_CODES, empty, lambda layer: subject.own(layer, codes, quantiser, empty), codes)
    if isinstance(subject, Prefix):
        yield Candidate(CODED, empty, lambda layer: subject.of_codes(layer, codes, quantiser), codes)


def measured(kind: str, size: int, device: torch.device) -> list[dict[str, Any]]:
    """All candidates of one size."""
    torch.manual_seed(0)
    subject = Images(size, device) if kind == "image" else Prefix(size, device)
    expected, found = subject.expected(), []
    for candidate in candidates(subject, kind):
        way = {"way": candidate.name, "variant": dict(candidate.variant)}
        try:
            us = layer_us(candidate.body, subject.layers, REPEATS)
        except KernelError as error:
            found.append(way | {"refused": str(error)})
            continue
        candidate.result.zero_()
        if candidate.name == LIBRARY:
            candidate.result.copy_(subject.library(0))
        else:
            candidate.body(0)
        exact = candidate.result.float() / (64 if candidate.result.dtype == CODES else 1)
        found.append(way | {"us": significant(us), "distance": significant(distance(exact, expected), 3)})
    return found


def shown(result: Mapping[str, Any]) -> str:
    """The table of a result."""
    rows = [
        (kind, size, way["way"], ", ".join(f"{k} {v}" for k, v in way["variant"].items()), way.get("us"),
         way.get("distance", way.get("refused")))
        for kind, sizes in result["attention"].items()
        for size, ways in sizes.items()
        for way in ways
    ]  # fmt: skip
    return table(("attention", "size", "way", "variant", "us", "distance"), rows)


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="image or prefix; nothing is written then")
    parser.add_argument("--show", type=Path, nargs="?", const=COMMITTED, help="print a result (default: the H200's)")
    args = parser.parse_args()
    kinds = args.only.split(",") if args.only else list(SIZES)
    unknown = [kind for kind in kinds if kind not in SIZES]
    if unknown:
        parser.error(f"unknown attention '{unknown[0]}'; there are: {', '.join(SIZES)}")
    if args.show is not None:
        if not args.show.is_file():
            parser.error(f"there is no result '{args.show}'; measure it on a GPU first")
        print(shown(json.loads(args.show.read_text())))
        return
    device = gpu("attention", unsuited)
    result = {
        "attention": {kind: {str(size): measured(kind, size, device) for size in SIZES[kind]} for kind in kinds},
        "sources": digests(*(name for kind in kinds for name in SOURCES[kind])),
    }
    if not args.only:
        write_result(result_name("attention", torch.cuda.get_device_name(device)), result, PROTOCOL)
    print(shown(result))


if __name__ == "__main__":
    main()
