"""The action expert as one resident grid, or phase by phase."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..shapes import check
from .compiler import KernelSource
from .errors import KernelError
from .expert_codes import HIDDEN_BLOCK, RANKS
from .expert_packing import ACTIONS, FEW_ROWS, HEAD_DIM, HEADS, HIDDEN, INNER, TILE_BYTES, WIDTH, ExpertWeights
from .kernel import HOPPER, Kernel, architecture, kernel
from .registers import demand_registers

MAX_ROWS, MAX_KEYS = 64, 1024
MAX_CLUSTERS = 16
_STAGE_TILES = 8
_PART_BYTES = 2  # of a part of a product or of attention that blocks of a cluster exchange
_SYNC_WORDS = 4
_FEWEST_STAGES = 4  # of the ring
_WARPS_OF_FEW_ROWS, _REGISTERS_OF_A_THREAD = 12, 128  # as in kernels/expert_plan.cuh
_ALIGNED = 1024  # bytes, of what lies behind the ring
_DOWN_TEAMS = 3  # of warps, which share the inputs of `down` with few rows
_SUM_WORDS = 2  # of a sum of fixed-point numbers, in which the shares of clusters meet


def phases_per_layer(rows: int) -> int:
    """Launches of a layer, phase by phase: with few rows `down` is part of `gate_up`."""
    return 4 if rows <= FEW_ROWS else 5


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
        return ShiftTables(*(torch.zeros(steps, *size, device=weights.device) for size in sizes))

    def fill(self, weights: ExpertWeights, modulation: Tensor) -> None:
        """Work them out in float32 from `modulation` (see ExpertKernel)."""
        shift = modulation[:, :, 1]
        for layer in range(weights.layers):
            for norm, stream, table in ((0, weights.project, self.project), (1, weights.gate_up, self.gate_up)):
                torch.matmul(shift[:, 2 * layer + norm], stream.matrix(layer).t(), out=table[:, layer])
        torch.addmm(weights.leave_bias, shift[:, -1], weights.leave_weight, out=self.leave)


@dataclass(frozen=True)
class ExpertScratch:
    """Memory that one launch leaves as the next one wants it: nobody else may write to it.

    Args:
        words: what blocks exchange, int32; -1 marks what has not been written, but sums of the shares of clusters,
            which few rows have, begin at 0.
        sync: which copy comes next, and how many blocks have finished.
    """

    words: Tensor
    sync: Tensor

    @staticmethod
    def allocate(rows: int, device: torch.device) -> ExpertScratch:
        """Scratch for `rows` rows.

        That is, for each: residual (two copies) and sums (four) as float; query, key, value, attended and hidden
        values (two) as bfloat16. Few rows have sums of shares (two) in the place of hidden values.
        """
        is_few = rows <= FEW_ROWS
        shares = 2 * _SUM_WORDS * WIDTH if is_few else 0
        count = 2 * WIDTH + 4 * WIDTH + INNER + 2 * HEAD_DIM + INNER + (0 if is_few else HIDDEN)
        words = torch.full((rows * (count + shares),), -1, dtype=torch.int32, device=device)
        words[rows * count :] = 0
        return ExpertScratch(words, torch.zeros(_SYNC_WORDS, dtype=torch.int32, device=device))


def _up(value: int, step: int) -> int:
    """`value` divided by `step`, rounded up."""
    return -(-value // step)


def keys_of_a_block(capacity: int, rows: int) -> int:
    """Keys that a block has room for: an eighth of the largest number in tiles of eight, in whole groups of four."""
    return 32 * _up(8 * _up(_up(capacity + rows, RANKS), 8), 32)


def warps_that_multiply(rows: int) -> int:
    """Of a block: the fewer, the more registers each has."""
    return _WARPS_OF_FEW_ROWS if rows <= 32 else 16


def operand_rows(rows: int) -> int:
    """Rows of the operand in shared memory: the chunk, in groups of eight."""
    return 8 * _up(rows, 8)


def _hidden_bytes(rows: int, clusters: int) -> int:
    """Bytes of a cluster's hidden values of few rows in every block, where 16 hold eight of one row."""
    stride = 16 * (2 if rows <= 2 else 10 if rows <= 10 else 18)  # free of bank conflicts
    return _up(HIDDEN // HIDDEN_BLOCK, clusters) * HIDDEN_BLOCK // 8 * stride


def _traded_bytes(rows: int) -> int:
    """Bytes of sums that pairs of warps trade, with few rows."""
    return warps_that_multiply(rows) * 32 * 16


def _team_bytes(rows: int) -> int:
    """Bytes of the sums of `down` that lie with the operands: a team of few rows may have its own with traded sums."""
    team = rows * (WIDTH // RANKS + 4) * 4
    return (_DOWN_TEAMS - (team <= _traded_bytes(rows))) * team


def _operand_bytes(rows: int, keys: int, clusters: int) -> int:
    """Bytes of what lies in the place of operands: those of a product, hidden values, or queries and their scores."""
    queries = _up(_up(rows * HEADS, clusters), 16) * 16
    scores = 4 * (keys + 4 + keys // 8)  # of a query: weights, and a maximum for each tile of eight keys
    attention = queries * (576 + scores)
    of_input = 2 * operand_rows(rows) // RANKS  # bytes, of a product's input
    if rows > FEW_ROWS:
        return max(HIDDEN * of_input, attention)
    unit_rows = warps_that_multiply(rows) * 32 * operand_rows(rows)  # where each warp turns sums into rows
    hidden = max(_team_bytes(rows), WIDTH * of_input + unit_rows) + _hidden_bytes(rows, clusters)
    return max(INNER * of_input, hidden, attention)


def shared_layout(
    rows: int, keys: int, clusters: int, shared_limit: int, stage_bytes: int = _STAGE_TILES * TILE_BYTES[16]
) -> tuple[int, int]:
    """(ring stages, bytes of shared memory) of a block that may have `shared_limit` bytes.

    Args:
        rows: of the chunk.
        keys: that a block has room for (see `keys_of_a_block`).
        clusters: size of the grid.
        stage_bytes: of the largest stage of the ring that some product needs.
    """

    def parts(tiles: int, unit: int, together: int) -> int:
        """Bytes of what a product behind a norm sends to one block: `unit` tiles have one owner, `together` one
        cluster."""
        slots = _up(_up(tiles // together, clusters) * together // unit, RANKS) * unit
        return slots * RANKS * rows * 8 * _PART_BYTES + 4 * RANKS * rows

    queries = _up(rows * HEADS, clusters)
    is_few = rows <= FEW_ROWS
    sums = _up(_up(WIDTH // 8, clusters), RANKS) * RANKS * rows * 8 * _PART_BYTES
    x = max(parts((INNER + 2 * HEAD_DIM) // 8, 1, 1), sums)
    y = max(RANKS * queries * (HEAD_DIM // RANKS * _PART_BYTES + 8), 0 if is_few else sums)
    leave = 4 * RANKS * (rows * ACTIONS + rows)
    values = max(keys * (HEAD_DIM * 2 + 16), parts(2 * HIDDEN // 8, 2, HIDDEN_BLOCK // 4 if is_few else 2), leave)
    traded = _traded_bytes(rows) if is_few else 0
    operands = _operand_bytes(rows, keys, clusters)
    fixed = x + y + values + operands + traded + 4 * rows * ACTIONS + 1024 + 128

    def needed_for(stages: int) -> int:
        return fixed + _ALIGNED * _up(stages * stage_bytes, _ALIGNED) + 16 * stages

    stages = (shared_limit - fixed) // (stage_bytes + 16)
    if needed_for(stages) > shared_limit:
        stages -= 1
    if stages < _FEWEST_STAGES:
        needed = needed_for(_FEWEST_STAGES)
        raise KernelError(
            f"expert: {rows} rows and {keys} keys a block need {needed} bytes of shared memory a block, "
            f"there are {shared_limit}; a shorter chunk or prefix needs less"
        )
    return stages, needed_for(stages)


def kernel_sizes(
    bits: tuple[int, int, int, int], rows: int, capacity: int, clusters: int, shared_limit: int
) -> dict[str, int]:
    """What decides the layout of a block's memory, as the kernel is told.

    Args:
        bits: of the weights of project, output, gate_up and down.
        rows, capacity, clusters: see ExpertKernel.
        shared_limit: bytes of shared memory that a block may have.
    """
    keys = keys_of_a_block(capacity, rows)
    stage_bytes = _STAGE_TILES * max(TILE_BYTES[each] for each in bits)
    stages, nbytes = shared_layout(rows, keys, clusters, shared_limit, stage_bytes)
    widths = dict(zip(("PROJECT_BITS", "OUTPUT_BITS", "GATE_UP_BITS", "DOWN_BITS"), bits, strict=True))
    layout = {
        "ROWS": rows, "OPERAND_ROWS": operand_rows(rows), "KEYS": keys, "CLUSTERS": clusters, "STAGES": stages,
        "SHARED_BYTES": nbytes,
    }  # fmt: skip
    return layout | widths


def registers_to_hand_over(arch: str, rows: int) -> int | None:
    """Registers that a launch must give to each thread, as its warps hand some to each other; None where they do not.

    On Hopper those that fetch give some to those that multiply, where these are few (kernels/expert_plan.cuh).
    """
    return _REGISTERS_OF_A_THREAD if arch == HOPPER and warps_that_multiply(rows) == _WARPS_OF_FEW_ROWS else None


class ExpertKernel:
    """The expert for one chunk length, on one device.

    Its blocks wait for each other, so all clusters must be resident: the grid is what an otherwise idle device holds,
    and a device that is busy only delays the start. No other kernel whose blocks wait for each other may start on
    another stream of the process meanwhile; a launch that makes no progress for seconds fails.

    Args:
        weights: packed.
        rows: chunk length, at most 64, and as far as shared memory goes: 61 on an H200 with 16-bit weights.
        steps: Euler steps.
        capacity: rows of the prefix at most; with `rows` at most 1024.
        persistent: one launch for everything; otherwise one launch a phase, which computes the same bits.
        overlap: launch the phases with programmatic overlap (no effect on a single launch).
        clusters: clusters of eight blocks in the grid, at most what the device holds at once. With more than FEW_ROWS
            rows it changes no bit; with fewer, sums are made in an order that depends on it.
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
        if weights.down.for_few_rows != (rows <= FEW_ROWS):
            raise KernelError(
                f"expert: the weights are packed for {'at most' if weights.down.for_few_rows else 'more than'} "
                f"{FEW_ROWS} rows, the chunk has {rows}; pack them for this length"
            )
        self.weights, self.rows, self.steps, self.capacity = weights, rows, steps, capacity
        self.persistent, self.overlap = persistent, overlap and not persistent
        self.device = weights.device
        count = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.clusters = min(clusters, MAX_CLUSTERS, count // RANKS)
        self.threads = 32 * (warps_that_multiply(rows) + 4)  # four warps fetch and fence
        self.kernel = self._resident_kernel()
        self.phases = steps * (phases_per_layer(rows) * weights.layers + 1)
        self._shifts = ShiftTables.allocate(weights, steps)
        self._is_prepared = False

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
        sizes = kernel_sizes(self.weights.bits, self.rows, self.capacity, self.clusters, limit)
        defines = {
            **sizes,
            "LAYERS": self.weights.layers,
            "RESIDENT": int(self.persistent),
            "OVERLAP": int(self.overlap),
        }
        source = KernelSource("expert", defines)
        registers = registers_to_hand_over(architecture(self.device), self.rows)
        if registers is not None:
            demand_registers(source, architecture(self.device), registers)
        return kernel(source, "expert", self.device, sizes["SHARED_BYTES"])

    def prepare(self, modulation: Tensor) -> None:
        """Fill the tables that depend on `modulation`, on the current stream, before a call with it."""
        check("expert", modulation=(modulation, (self.steps, 2 * self.weights.layers + 1, 3, WIDTH)))
        self._shifts.fill(self.weights, modulation)
        self._is_prepared = True

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

        Raises:
            ShapeError: a tensor has another shape.
            KernelError: `prepare` was never called, or the prefix is not what the kernel was built for.
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
        if not self._is_prepared:
            raise KernelError("expert: the tables of the modulations are missing; call prepare() first")
        tensors = (modulation, rope, prefix_key, prefix_value, valid, noise, actions)
        for phase in range(1 if self.persistent else self.phases):
            self._launch(tensors, scratch, phase)

    def _launch(self, tensors: tuple[Tensor, ...], scratch: ExpertScratch, phase: int) -> None:
        w, shifts = self.weights, self._shifts
        self.kernel.launch(
            self.clusters, self.threads,
            *(stream.tiles for stream in w.streams), w.enter_weight, w.enter_bias, w.leave_weight, shifts.leave,
            tensors[0], shifts.project, shifts.gate_up, *tensors[1:], scratch.words, scratch.sync,
            tensors[2].stride(0) // HEAD_DIM, self.steps, phase, *(stream.factor for stream in w.streams),
            cluster=RANKS, overlap=self.overlap and phase > 0,
        )  # fmt: skip
