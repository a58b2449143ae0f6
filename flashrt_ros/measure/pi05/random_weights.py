"""Random weights of any size, written straight into a safetensors file.

They are not trained, and not the contraction that `seeded_tensors` arranges: every parameter is drawn independently, at
a scale that keeps a deep network steady, so that a difference between two implementations is neither amplified into
chaos nor hidden. What an implementation can get wrong unnoticed under default initialisation is alive: every norm
weight, and all three outputs of every adaptive norm.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ...policies.pi05.config import Pi05Config
from ...policies.pi05.layout import EMBEDDING, EXPERT_HEAD, TIED_EMBEDDING, VISION, Shape, expected_shapes
from ...policies.progress import Advance, progress

STORED = {torch.bfloat16: "BF16", torch.float32: "F32"}
_BLOCK = 1 << 22  # values drawn at once; seed, name and number decide a block, so the number of cores does not
_SHARPNESS = 2.0  # gain of the query projections: with 1, attention averages hundreds of keys into nothing
_TIME_GAIN = 2.0  # gain of the two time layers, so that the condition of the adaptive norms has values around one
_ADAPTIVE, _NORM, _BIAS, _POSITION = 0.02, 0.1, 0.1, 0.3
_RESIDUAL = re.compile(r"(self_attn\.(o|out)_proj|down_proj|fc2)\.weight$")  # projections that add to a residual


@dataclass(frozen=True)
class _Entry:
    """One tensor of the file: where its bytes begin, and where else they stand."""

    name: str
    shape: Shape
    offset: int
    twin: int | None = None

    @property
    def count(self) -> int:
        return math.prod(self.shape)


def write_random_weights(path: Path, config: Pi05Config, seed: int, dtype: torch.dtype) -> int:
    """Write every tensor that LeRobot 0.6.1 expects for `config`; returns the file's size in bytes.

    Memory stays at some tens of megabytes for each core. The two output heads that LeRobot demands and nothing uses
    are there: the language head is the embedding again, the expert's is a hole of zeros in the file.
    """
    header, entries, size = _plan(config, dtype)

    def block(entry: _Entry, number: int) -> Tensor:
        return _drawn(entry, number, _scale(entry, config), seed).to(dtype)

    with open(path, "wb") as file:
        file.write(header)
        file.truncate(size)
        descriptor = file.fileno()
        total = sum(entry.count for entry in entries) * dtype.itemsize
        with progress(f"writing {path.name}", total) as advance, ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = [
                pool.submit(_write_block, descriptor, entry, number, partial(block, entry, number), advance)
                for entry in entries
                for number in range(-(-entry.count // _BLOCK))
            ]
            for job in jobs:
                job.result()
    return size


def _plan(config: Pi05Config, dtype: torch.dtype) -> tuple[bytes, list[_Entry], int]:
    """The file's header, the tensors to draw, and the file's size."""
    shapes: dict[str, Shape] = expected_shapes(config)
    shapes[TIED_EMBEDDING] = shapes[EMBEDDING]
    shapes[EXPERT_HEAD] = (config.vocabulary, config.expert_width)
    spans: dict[str, tuple[int, int]] = {}
    end = 0
    for name in sorted(shapes):
        begin, end = end, end + math.prod(shapes[name]) * dtype.itemsize
        spans[name] = (begin, end)
    header = _header(shapes, spans, dtype)
    entries = [
        _Entry(name, shape, len(header) + spans[name][0], _twin(name, spans, len(header)))
        for name, shape in shapes.items()
        if name not in (TIED_EMBEDDING, EXPERT_HEAD)
    ]
    return header, entries, len(header) + end


def _twin(name: str, spans: Mapping[str, tuple[int, int]], base: int) -> int | None:
    return base + spans[TIED_EMBEDDING][0] if name == EMBEDDING else None


def _header(shapes: Mapping[str, Shape], spans: Mapping[str, tuple[int, int]], dtype: torch.dtype) -> bytes:
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for name in sorted(shapes):
        described[f"model.{name}"] = {
            "dtype": STORED[dtype], "shape": list(shapes[name]), "data_offsets": list(spans[name]),
        }  # fmt: skip
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _write_block(descriptor: int, entry: _Entry, number: int, values: Callable[[], Tensor], advance: Advance) -> None:
    drawn = values()
    data = drawn.view(torch.uint8).numpy().data
    skipped = number * _BLOCK * drawn.dtype.itemsize
    for offset in (entry.offset, entry.twin):
        if offset is not None:
            _write_all(descriptor, data, offset + skipped)
    advance(len(data))


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _drawn(entry: _Entry, number: int, scale: tuple[float, float], seed: int) -> Tensor:
    """float32 values of block `number`: mean + deviation * N(0, 1)."""
    name = f"{seed} {entry.name} {number}".encode()
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name).digest()[:8], "little") >> 1)
    mean, deviation = scale
    count = min(_BLOCK, entry.count - number * _BLOCK)
    return torch.randn(count, generator=generator).mul_(deviation).add_(mean)


def random_tensors(config: Pi05Config, seed: int) -> Iterator[tuple[str, Tensor]]:
    """What `write_random_weights` draws, in float32 and in memory; for small configurations."""
    _, entries, _ = _plan(config, torch.float32)
    for entry in entries:
        blocks = [_drawn(entry, n, _scale(entry, config), seed) for n in range(-(-entry.count // _BLOCK))]
        yield entry.name, torch.cat(blocks).view(entry.shape)


def _scale(entry: _Entry, config: Pi05Config) -> tuple[float, float]:
    """Mean and standard deviation of a tensor's values."""
    name, shape = entry.name, entry.shape
    if ".dense." in name:
        return 0.0, _ADAPTIVE
    if "norm" in name:
        # LayerNorm's weight stands for itself, RMSNorm's is added to one.
        return float(name.startswith(VISION) and name.endswith(".weight")), _NORM
    if name.endswith(".bias"):
        return 0.0, _BIAS
    if "position" in name:
        return 0.0, _POSITION
    deviation = 1 / math.sqrt(math.prod(shape[1:]))
    if _RESIDUAL.search(name):
        depth = config.vision_layers if name.startswith(VISION) else config.layers
        return 0.0, deviation / math.sqrt(2 * depth)
    if "q_proj" in name:
        return 0.0, deviation * _SHARPNESS
    return 0.0, deviation * (_TIME_GAIN if name.startswith("time_mlp") else 1.0)
