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
RANKS = 8  # blocks of a cluster, which share the inputs of every product and the keys
MAX_CLUSTERS = 16
_CHUNK = 64  # inputs that one stage of the ring holds of eight tiles
_STAGE_BYTES = 8192
_PART_BYTES = 2  # of a value that blocks of a cluster exchange behind a norm
_SYNC_WORDS = 4
_FEWEST_STAGES = 4  # of the ring
PHASES_PER_LAYER = 5


def pack_tiles(weight: Tensor) -> Tensor:
    """Reorder bf16[layers, outputs, inputs] into the tiles that the kernel streams.

    Result bf16[layers, ranks, chunks of 64 inputs, outputs / 8, 8, 8, 8]: a rank has an eighth of the inputs; a tile's
    part of a chunk is eight matrices, each of eight outputs by eight inputs.
    """
    layers, outputs, inputs = weight.shape
    view = weight.view(layers, outputs // 8, 8, RANKS, inputs // RANKS // _CHUNK, _CHUNK // 8, 8)
    return view.permute(0, 3, 4, 1, 5, 2, 6).contiguous()


def unpack_tiles(packed: Tensor) -> Tensor:
    """The weights bf16[layers, outputs, inputs] that `pack_tiles` made `packed` of."""
    layers, ranks, chunks, tiles = packed.shape[:4]
    return packed.permute(0, 3, 5, 1, 2, 4, 6).reshape(layers, 8 * tiles, ranks * chunks * _CHUNK)


def alternate_tiles(weight: Tensor) -> Tensor:
    """Reorder bf16[layers, 2 * hidden, inputs], gate then up: tiles of eight outputs alternate between them."""
    layers, outputs, inputs = weight.shape
    return weight.view(layers, 2, outputs // 16, 8, inputs).transpose(1, 2).reshape(layers, outputs, inputs)


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
        leave_weight, leave_bias: float32[width, actions], float32[actions]; both carry the step size.
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
    return ExpertWeights(
        project=pack_tiles(qkv[:, order]),
        output=pack_tiles(output),
        gate_up=pack_tiles(alternate_tiles(gate_up)),
        down=pack_tiles(down),
        enter_weight=enter[0].float().t().contiguous(),
        enter_bias=enter[1].float().contiguous(),
        leave_weight=leave[0].float().t().contiguous(),
        leave_bias=leave[1].float().contiguous(),
    )


@dataclass(frozen=True)
class ShiftTables:
    """What the shifts of the adaptive norms give behind their products, which depends on weights and step alone.

    Args:
        project: float32[steps, layers, 2560], shift of the norm in front @ project, in the order of the packed outputs.
        gate_up: float32[steps, layers, 8192], likewise.
        leave: float32[steps, actions], shift of the last norm @ leave_weight + leave_bias.
    """

    project: Tensor
    gate_up: Tensor
    leave: Tensor

    @staticmethod
    def allocate(weights: ExpertWeights, steps: int) -> ShiftTables:
        """Tables of zeros on the device of `weights`."""
        sizes = (weights.layers, INNER + 2 * HEAD_DIM), (weights.layers, 2 * HIDDEN), (ACTIONS,)
        return ShiftTables(*(torch.zeros(steps, *size, device=weights.project.device) for size in sizes))

    def fill(self, weights: ExpertWeights, modulation: Tensor) -> None:
        """Work them out in float32 from `modulation` (see ExpertKernel)."""
        shift = modulation[:, :, 1]
        for layer in range(weights.layers):
            for norm, packed, table in ((0, weights.project, self.project), (1, weights.gate_up, self.gate_up)):
                matrix = unpack_tiles(packed[layer : layer + 1])[0].float()
                torch.matmul(shift[:, 2 * layer + norm], matrix.t(), out=table[:, layer])
        torch.addmm(weights.leave_bias, shift[:, -1], weights.leave_weight, out=self.leave)


@dataclass(frozen=True)
class ExpertScratch:
    """Memory that one launch leaves as the next one wants it: nobody else may write to it.

    Args:
        words: what blocks exchange, int32; -1 marks what has not been written.
        sync: which copy comes next, and how many blocks have finished.
    """

    words: Tensor
    sync: Tensor

    @staticmethod
    def allocate(rows: int, device: torch.device) -> ExpertScratch:
        """Scratch for `rows` rows: residual (two copies), sums (four) as float; two copies of the rest as bfloat16."""
        count = rows * (2 * WIDTH + 4 * WIDTH + INNER + 2 * HEAD_DIM + INNER + HIDDEN)
        return ExpertScratch(
            torch.full((count,), -1, dtype=torch.int32, device=device),
            torch.zeros(_SYNC_WORDS, dtype=torch.int32, device=device),
        )


def _up(value: int, step: int) -> int:
    """`value` divided by `step`, rounded up."""
    return -(-value // step)


def keys_of_a_block(capacity: int, rows: int) -> int:
    """Keys that a block has room for: an eighth of the largest number, in whole tiles of eight and steps of sixteen."""
    return 16 * _up(8 * _up(_up(capacity + rows, RANKS), 8), 16)


def warps_that_multiply(rows: int) -> int:
    """Of a block: the fewer, the more registers each has."""
    return 12 if rows <= 32 else 16


def operand_rows(rows: int) -> int:
    """Rows of the operand in shared memory: the chunk, in groups of eight."""
    return 8 * _up(rows, 8)


def shared_layout(rows: int, keys: int, clusters: int, shared_limit: int) -> tuple[int, int]:
    """(ring stages, bytes of shared memory) of a block that may have `shared_limit` bytes.

    Args:
        rows: of the chunk.
        keys: that a block has room for (see `keys_of_a_block`).
        clusters: size of the grid.
    """

    def parts(tiles: int, unit: int) -> int:
        """Bytes of what a product behind a norm sends to one block."""
        slots = _up(_up(tiles // unit, clusters), RANKS) * unit
        return slots * RANKS * rows * 8 * _PART_BYTES + 4 * RANKS * rows

    queries = _up(rows * HEADS, clusters)
    few = operand_rows(rows) <= 16
    sums = _up(_up(WIDTH // 8, clusters), RANKS) * RANKS * rows * 8 * _PART_BYTES
    x = max(parts((INNER + 2 * HEAD_DIM) // 8, 1), sums)
    y = max(4 * RANKS * queries * (HEAD_DIM // RANKS + 2), sums)
    leave = 4 * RANKS * (rows * ACTIONS + rows)
    values = max(keys * (HEAD_DIM * 2 + 16), parts(2 * HIDDEN // 8, 2), leave)
    operands = max(HIDDEN // RANKS * 2 * operand_rows(rows), 16 * _up(queries, 16) * (576 + (keys + 8) * 6))
    traded = warps_that_multiply(rows) * 32 * 16 if few else 0
    fixed = x + y + values + operands + traded + 4 * rows * ACTIONS + 1024 + 128
    stages = (shared_limit - fixed) // (_STAGE_BYTES + 16)
    if stages < _FEWEST_STAGES:
        needed = fixed + _FEWEST_STAGES * (_STAGE_BYTES + 16)
        raise KernelError(
            f"expert: {rows} rows and {keys} keys a block need {needed} bytes of shared memory a block, "
            f"there are {shared_limit}"
        )
    return stages, fixed + stages * (_STAGE_BYTES + 16)


class ExpertKernel:
    """The expert for one chunk length, on one device.

    Its blocks wait for each other, so all clusters must be resident: the grid is what an otherwise idle device holds,
    and a device that is busy only delays the start. No other kernel whose blocks wait for each other may start on
    another stream of the process meanwhile; a launch that makes no progress for seconds fails.

    Args:
        weights: packed.
        rows: chunk length, at most 64.
        steps: Euler steps.
        capacity: rows of the prefix at most; with `rows` at most 1024.
        persistent: one launch for everything; otherwise one launch a phase, which computes the same bits.
        overlap: launch the phases with programmatic overlap (no effect on a single launch).
        clusters: clusters of eight blocks in the grid, at most what the device holds at once; it changes no bit.
    """

    def __init__(
        self,
        weights: ExpertWeights,
        rows: int,
        steps: int,
        *,
        capacity: int,
        persistent: bool = True,
        overlap: bool = False,
        clusters: int = MAX_CLUSTERS,
    ) -> None:
        if not 0 < rows <= MAX_ROWS or capacity + rows > MAX_KEYS:
            raise KernelError(
                f"expert: {rows} rows behind {capacity}, the kernel takes 1 to {MAX_ROWS} rows and {MAX_KEYS} keys"
            )
        self.weights, self.rows, self.steps, self.capacity = weights, rows, steps, capacity
        self.persistent, self.overlap = persistent, overlap and not persistent
        self.device = weights.project.device
        count = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.clusters = min(clusters, MAX_CLUSTERS, count // RANKS)
        self.threads = 32 * (warps_that_multiply(rows) + 4)  # four warps fetch and fence
        self.kernel = self._resident_kernel()
        self.phases = steps * (PHASES_PER_LAYER * weights.layers + 1)
        self._shifts = ShiftTables.allocate(weights, steps)

    def _resident_kernel(self) -> Kernel:
        """The kernel for as many clusters as run at once: not every part of a device has room for the last ones."""
        while self.clusters > 0:
            made = self._compiled()
            fitting = made.resident_clusters(self.clusters, RANKS, self.threads)
            if fitting >= self.clusters:
                return made
            self.clusters = fitting
        raise KernelError(f"expert: this GPU runs no cluster of {RANKS} blocks with the shared memory that one needs")

    def _compiled(self) -> Kernel:
        limit = int(getattr(torch.cuda.get_device_properties(self.device), "shared_memory_per_block_optin"))  # noqa: B009 - missing in torch's stubs
        keys = keys_of_a_block(self.capacity, self.rows)
        stages, nbytes = shared_layout(self.rows, keys, self.clusters, limit)
        defines = {
            "ROWS": self.rows,
            "KEYS": keys,
            "STAGES": stages,
            "SHARED_BYTES": nbytes,
            "LAYERS": self.weights.layers,
            "CLUSTERS": self.clusters,
            "RESIDENT": int(self.persistent),
            "OVERLAP": int(self.overlap),
        }
        return kernel(KernelSource("expert", defines), "expert", self.device, nbytes)

    def prepare(self, modulation: Tensor) -> None:
        """Fill the tables that depend on `modulation`, before a call with it."""
        check("expert", modulation=(modulation, (self.steps, 2 * self.weights.layers + 1, 3, WIDTH)))
        self._shifts.fill(self.weights, modulation)

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
            modulation: float32[steps, 2 * layers + 1, 3, width]: scale, shift, gate; that of the last `prepare`.
            rope: bf16[rows, head_dim]: cosines, then sines, of the chunk's positions.
            prefix_key, prefix_value: bf16[layers, at most capacity, head_dim].
            valid: int32[1], rows of the prefix that take part; at most capacity.
            noise: float32[rows, 32]; actions: float32[rows, 32], written, not `noise`.
            scratch: as `ExpertScratch.allocate` made it and earlier calls left it.
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
        if prefix_key.shape[1] > self.capacity or prefix_key.stride() != prefix_value.stride():
            raise KernelError(
                f"expert: {prefix_key.shape[1]} prefix rows, the kernel was built for {self.capacity}; key and value "
                f"need equal strides, got {prefix_key.stride()} and {prefix_value.stride()}"
            )
        tensors = (modulation, rope, prefix_key, prefix_value, valid, noise, actions)
        for phase in range(1 if self.persistent else self.phases):
            self._launch(tensors, scratch, phase)

    def _launch(self, tensors: tuple[Tensor, ...], scratch: ExpertScratch, phase: int) -> None:
        w, shifts = self.weights, self._shifts
        self.kernel.launch(
            self.clusters, self.threads,
            w.project, w.output, w.gate_up, w.down, w.enter_weight, w.enter_bias, w.leave_weight, shifts.leave,
            tensors[0], shifts.project, shifts.gate_up, *tensors[1:], scratch.words, scratch.sync,
            tensors[2].stride(0) // HEAD_DIM, self.steps, phase,
            cluster=RANKS, overlap=self.overlap and phase > 0,
        )  # fmt: skip
