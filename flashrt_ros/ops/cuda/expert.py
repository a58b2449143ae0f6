"""The action expert as one resident grid (or phase by phase), and the packing of its weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..shapes import check
from .compiler import KernelSource
from .errors import KernelError
from .kernel import Kernel, kernel

WIDTH, HEADS, HEAD_DIM, HIDDEN, ACTIONS = 1024, 8, 256, 4096, 32  # what kernels/expert.cu is written for
INNER = HEADS * HEAD_DIM
MAX_ROWS, MAX_KEYS = 64, 1024
SPLITS = 16
BLOCKS = 128  # every product has a multiple of 128 tiles, and attention has 128 parts
_THREADS = 640
_STAGE_BYTES = 16384
_HELD_STAGES = 8  # of the ring, that the widest phase reads at once
_SYNC_WORDS = 32 * (HEADS + 2)
PHASES_PER_LAYER = 6


def pack_tiles(weight: Tensor) -> Tensor:
    """Reorder bf16[layers, outputs, inputs] into the stages that the kernel streams.

    Result bf16[layers, outputs / 8, inputs / 1024, 8192]: a stage holds eight outputs and 1024 inputs in the order
    warp, group, output, quad, eight inputs.
    """
    layers, outputs, inputs = weight.shape
    view = weight.view(layers, outputs // 8, 8, inputs // 1024, 8, 4, 4, 8)
    return view.permute(0, 1, 3, 4, 5, 2, 6, 7).reshape(layers, outputs // 8, inputs // 1024, 8192).contiguous()


def rotary_pairs(heads: int) -> Tensor:
    """Order of the features of `heads` heads that puts i and i + 128 side by side."""
    half = HEAD_DIM // 2
    inside = torch.stack((torch.arange(half), torch.arange(half) + half), dim=1).flatten()
    return (torch.arange(heads)[:, None] * HEAD_DIM + inside).flatten()


@dataclass(frozen=True)
class ExpertWeights:
    """All weights of the expert, as the kernel reads them.

    Args:
        project, output, gate_up, down: packed stages, bf16 (see `pack`).
        enter_weight, enter_bias: float32[actions, width], float32[width].
        leave_weight, leave_bias: float32[actions, width], float32[actions]; both carry the step size.
    """

    project: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor
    enter_weight: Tensor
    enter_bias: Tensor
    leave_weight: Tensor
    leave_bias: Tensor

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.project.shape[0]


def pack(
    qkv: Tensor,
    output: Tensor,
    gate_up: Tensor,
    down: Tensor,
    enter: tuple[Tensor, Tensor],
    leave: tuple[Tensor, Tensor],
) -> ExpertWeights:
    """Pack plain weights: a stack of layers for each product, each [layers, outputs, inputs].

    Args:
        qkv: bf16[layers, 2560, 1024], query, key, value.
        output: bf16[layers, 1024, 2048].
        gate_up: bf16[layers, 8192, 1024], all of gate, then all of up.
        down: bf16[layers, 1024, 4096].
        enter: weight [1024, 32] and bias [1024] from actions to the expert.
        leave: weight [32, 1024] and bias [32] back, both multiplied by the step size already.
    """
    check(
        "expert weights",
        qkv=(qkv, ("layers", INNER + 2 * HEAD_DIM, WIDTH)),
        output=(output, ("layers", WIDTH, INNER)),
        gate_up=(gate_up, ("layers", 2 * HIDDEN, WIDTH)),
        down=(down, ("layers", WIDTH, HIDDEN)),
        enter=(enter[0], (WIDTH, ACTIONS)),
        leave=(leave[0], (ACTIONS, WIDTH)),
    )
    rotated = rotary_pairs(HEADS + 1)
    order = torch.cat((rotated, torch.arange(HEAD_DIM) + len(rotated))).to(qkv.device)
    layers = qkv.shape[0]
    halves = pack_tiles(gate_up).view(layers, 2, HIDDEN // 8, 8192)
    return ExpertWeights(
        project=pack_tiles(qkv[:, order]),
        output=pack_tiles(output),
        gate_up=halves.transpose(1, 2).contiguous(),
        down=pack_tiles(down),
        enter_weight=enter[0].float().t().contiguous(),
        enter_bias=enter[1].float().contiguous(),
        leave_weight=leave[0].float().contiguous(),
        leave_bias=leave[1].float().contiguous(),
    )


@dataclass(frozen=True)
class ExpertScratch:
    """Memory that is worthless between two launches, except that `sync` must stay zero."""

    x: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    attended: Tensor
    hidden: Tensor
    partial: Tensor
    extremes: Tensor
    sync: Tensor

    @staticmethod
    def allocate(rows: int, device: torch.device) -> ExpertScratch:
        """Scratch for `rows` rows."""

        def rows_of(width: int) -> Tensor:
            return torch.zeros(rows, width, dtype=torch.bfloat16, device=device)

        return ExpertScratch(
            rows_of(WIDTH), rows_of(INNER), rows_of(HEAD_DIM), rows_of(HEAD_DIM), rows_of(INNER), rows_of(HIDDEN),
            torch.zeros(HEADS, SPLITS, rows, HEAD_DIM, device=device),
            torch.zeros(HEADS, SPLITS, rows, 2, device=device),
            torch.zeros(_SYNC_WORDS, dtype=torch.int32, device=device),
        )  # fmt: skip


def shared_layout(rows: int, shared_limit: int) -> tuple[int, int]:
    """(ring stages, bytes of shared memory) of a block for `rows` rows where a block may have `shared_limit` bytes."""
    tiles = -(-rows // 16)
    scores = tiles * 16 * 72
    scratch = max(16 * 8 * 128 * 4, 64 * HEAD_DIM * 2 + 2 * scores * 4 + scores * 2)
    fixed = scratch + 16 * min(tiles, 2) * 16 * 4 + 2 * WIDTH * 4 + 512
    stages = (shared_limit - fixed) // (_STAGE_BYTES + 16)
    if stages < _HELD_STAGES:
        needed = fixed + _HELD_STAGES * (_STAGE_BYTES + 16)
        raise KernelError(f"expert: {rows} rows need {needed} bytes of shared memory a block, there are {shared_limit}")
    return stages, fixed + stages * (_STAGE_BYTES + 16)


class ExpertKernel:
    """The expert for one chunk length, on one device.

    Args:
        weights: packed.
        rows: chunk length, at most 64.
        steps: Euler steps.
        persistent: one launch for everything; otherwise one launch a phase, which computes the same bits.
        overlap: launch the phases with programmatic overlap (no effect on a single launch).
        blocks: size of the grid, at most one block a multiprocessor; it changes no bit.
    """

    def __init__(
        self,
        weights: ExpertWeights,
        rows: int,
        steps: int,
        *,
        persistent: bool = True,
        overlap: bool = False,
        blocks: int = BLOCKS,
    ) -> None:
        if not 0 < rows <= MAX_ROWS:
            raise KernelError(f"expert: {rows} rows, the kernel takes 1 to {MAX_ROWS}")
        self.weights, self.rows, self.steps = weights, rows, steps
        self.persistent, self.overlap = persistent, overlap and not persistent
        device = weights.project.device
        properties = torch.cuda.get_device_properties(device)
        self.blocks = min(blocks, properties.multi_processor_count)
        limit = int(getattr(properties, "shared_memory_per_block_optin"))  # noqa: B009 - missing in torch's stubs
        stages, nbytes = shared_layout(rows, limit)
        defines = {
            "ROWS": rows,
            "STAGES": stages,
            "LAYERS": weights.layers,
            "BLOCKS": self.blocks,
            "OVERLAP": int(self.overlap),
        }
        self.kernel: Kernel = kernel(KernelSource("expert", defines), "expert", device, nbytes)
        self.phases = steps * (2 + PHASES_PER_LAYER * weights.layers)

    def __call__(
        self,
        modulation: Tensor,
        rope: Tensor,
        prefix_key: Tensor,
        prefix_value: Tensor,
        valid: Tensor,
        noise: Tensor,
        actions: Tensor,
        scratch: ExpertScratch,
    ) -> None:
        """actions = all Euler steps from noise.

        Args:
            modulation: float32[steps, 2 * layers + 1, 3, width]: scale, shift, gate.
            rope: bf16[rows, head_dim]: cosines, then sines, of the chunk's positions.
            prefix_key, prefix_value: bf16[layers, capacity, head_dim].
            valid: int32[1], rows of the prefix that take part; at most capacity, and valid + rows at most 1024.
            noise: float32[rows, 32]; actions: float32[rows, 32], written, not `noise`.
        """
        layers = self.weights.layers
        check(
            "expert",
            modulation=(modulation, (self.steps, 2 * layers + 1, 3, WIDTH)),
            rope=(rope, (self.rows, HEAD_DIM)),
            prefix_key=(prefix_key, (layers, "capacity", HEAD_DIM)),
            prefix_value=(prefix_value, (layers, "capacity", HEAD_DIM)),
            valid=(valid, (1,)),
            noise=(noise, (self.rows, ACTIONS)),
            actions=(actions, (self.rows, ACTIONS)),
        )
        if prefix_key.shape[1] + self.rows > MAX_KEYS or prefix_key.stride() != prefix_value.stride():
            raise KernelError(
                f"expert: {prefix_key.shape[1]} prefix rows and {self.rows} chunk rows, the kernel takes {MAX_KEYS} "
                f"keys; key and value need equal strides, got {prefix_key.stride()} and {prefix_value.stride()}"
            )
        tensors = (modulation, rope, prefix_key, prefix_value, valid, noise, actions)
        if self.persistent:
            self._launch(tensors, scratch, 0, self.phases)
            return
        for phase in range(self.phases):
            self._launch(tensors, scratch, phase, phase + 1)

    def _launch(self, tensors: tuple[Tensor, ...], scratch: ExpertScratch, first: int, last: int) -> None:
        w, s = self.weights, scratch
        self.kernel.launch(
            self.blocks, _THREADS,
            w.project, w.output, w.gate_up, w.down, w.enter_weight, w.enter_bias, w.leave_weight, w.leave_bias,
            *tensors,
            s.x, s.query, s.key, s.value, s.attended, s.hidden, s.partial, s.extremes, s.sync,
            tensors[2].stride(0) // HEAD_DIM, first, last,
            cooperative=self.persistent, overlap=self.overlap and first > 0,
        )  # fmt: skip
