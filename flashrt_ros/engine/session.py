"""The session: the only thing that drives a contract."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

from ..contract import Contract, Role
from .arena import Arena, resolve_device
from .errors import (
    EngineError,
    RoleError,
    StateError,
    UncapturedShapeError,
    UnfilledWindowError,
    WindowError,
)
from .graphs import GraphSet, StageBody
from .versions import VersionLedger
from .windows import Window, checked, open_windows


class Session:
    """Fills windows, replays what is stale in contract order, reads results.

    Life: construct → `prepare` STATIC buffers that no stage writes → `configure` (captures everything) → hot loop →
    `close`. After `configure` nothing allocates, captures or rebinds. One thread at a time may drive a session; a
    second one gets StateError instead of torn data.

    Args:
        contract: the plan.
        bodies: one body for each stage of the plan.
        device: "cpu", "cuda" or "cuda:N"; DeviceError if this machine lacks it.
        seed: of the generator that `draw` uses. It runs on the host, so a seed gives equal noise on every device.
    """

    def __init__(
        self,
        contract: Contract,
        bodies: Mapping[str, StageBody],
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        self.contract = contract
        self.device = resolve_device(device)
        self._arena: Arena | None = Arena(contract, self.device)
        self.generator = torch.Generator().manual_seed(seed)
        self.extents: dict[str, int] = {extent.name: 0 for extent in contract.extents}
        self.counts: Counter[str] = Counter({stage.name: 0 for stage in contract.stages})
        self.stale_refusals = 0
        self._bodies = bodies
        self._order = tuple(stage.name for stage in contract.order)
        self._windows: dict[str, Window] = open_windows(contract, self.arena)
        self._ledger = VersionLedger(contract, contract.variants[0].name)
        self._unfilled = {b.name for b in contract.buffers if b.filled_by_host and self._is_read(b.name)}
        self._graphs: GraphSet | None = None
        self._closed = False
        self._driving = threading.Lock()

    # -- life ------------------------------------------------------------------------------------------------------

    def prepare(self, name: str, value: torch.Tensor) -> None:
        """Copy `value` into STATIC buffer `name`, before `configure` only (its update event)."""
        buffer = self.contract.buffer(name)
        if buffer.role is not Role.STATIC or name in self.contract.writers:
            raise RoleError(
                f"'{name}' is not a STATIC buffer without a writer; only those are prepared by hand"
            )
        if self._graphs is not None:
            raise RoleError(
                f"STATIC buffer '{name}' is read-only after configure; prepare it before, or build a new session"
            )
        target = self.arena[name]
        if value.shape != target.shape or value.dtype != target.dtype:
            raise WindowError(
                f"'{name}' holds {target.dtype}{list(target.shape)}, got {value.dtype}{list(value.shape)}"
            )
        target.copy_(value)
        self._ledger.bump(name)

    def configure(self) -> None:
        """Capture every stage for every shape key, once; STATE buffers start from zero afterwards."""
        if self._graphs is not None or self._closed:
            raise StateError("a session is configured once; build a new one to configure again")
        for buffer in self.contract.buffers:
            orphan = buffer.role is Role.STATIC and buffer.name not in self.contract.writers
            if orphan and self._ledger.versions[buffer.name] == 0:
                raise UnfilledWindowError(
                    f"STATIC buffer '{buffer.name}' was not prepared; call prepare() first"
                )
        self._graphs = GraphSet(self.contract, self._bodies, self.arena, self.device)
        for buffer in self.contract.buffers:
            if buffer.role is Role.STATE:  # capturing ran the bodies, which may have accumulated into it
                self.arena[buffer.name].zero_()

    def close(self) -> None:
        """Release graphs and memory. Safe to call twice."""
        if self._closed:
            return
        with self._exclusively("close"):
            self._closed = True
            self._graphs = None
            self._windows = {}
            self._bodies = {}
            self._arena = None

    # -- filling ---------------------------------------------------------------------------------------------------

    @contextmanager
    def window(self, name: str, rows: int | None = None) -> Iterator[np.ndarray]:
        """Yield the host memory of window `name` to be written in place; leaving the block makes readers stale.

        Args:
            rows: only the first `rows` rows of axis 0 are yielded and sent to the device; all by default.
        """
        window = self._input_window(name)
        capacity = len(window.array)
        count = capacity if rows is None else rows
        if not 0 < count <= capacity:
            raise WindowError(f"window '{name}' has {capacity} rows, cannot fill {count}")
        with self._exclusively(f"fill '{name}'"):
            window.wait()
            try:
                yield window.array[:count]
            finally:  # a block that broke off has torn the window: the content changed, so the version must too
                window.upload(count)
                self._ledger.bump(name)
            self._unfilled.discard(name)

    def fill(self, name: str, value: np.ndarray) -> None:
        """Copy `value` (exact shape and dtype) into window `name`, once."""
        value = checked(self._input_window(name), value)
        with self.window(name) as target:
            np.copyto(target, value)

    def draw(self, name: str = "noise") -> None:
        """Refill float32 window `name` with N(0, 1) from the session's generator."""
        window = self._input_window(name)
        if window.tensor.dtype is not torch.float32:
            raise WindowError(
                f"window '{name}' is {window.tensor.dtype}, noise is drawn into float32 windows only"
            )
        with self.window(name):
            window.tensor.normal_(generator=self.generator)

    def seed(self, seed: int) -> None:
        """Restart the noise generator."""
        self.generator.manual_seed(seed)

    def select(self, variant: str) -> None:
        """Choose the shape key of the next replays; UncapturedShapeError if it was not captured."""
        if not any(known.name == variant for known in self.contract.variants):
            captured = ", ".join(known.name for known in self.contract.variants)
            raise UncapturedShapeError(
                f"shape '{variant}' was not captured; captured at configure: {captured}"
            )
        self._ledger.variant = variant

    def set_extent(self, name: str, value: int) -> None:
        """Say how many rows of extent `name` are live."""
        maximum = self.contract.extent(name).maximum
        if not 0 <= value <= maximum:
            raise WindowError(f"extent '{name}' is {value}, expected 0 to {maximum}")
        self.extents[name] = value

    # -- driving ---------------------------------------------------------------------------------------------------

    def act(self) -> tuple[str, ...]:
        """Replay exactly the stale stages, in contract order, and return their names."""
        with self._exclusively("act"):
            self._require_filled()
            is_stale = self._ledger.is_stale
            replayed = []
            for stage in self._order:
                if is_stale(stage):
                    self._run(stage)
                    replayed.append(stage)
            return tuple(replayed)

    def replay(self, stage: str) -> None:
        """Replay one stage by hand; StaleInputError if what it would read is stale."""
        self.contract.stage(stage)
        with self._exclusively(f"replay '{stage}'"):
            self._require_filled()
            try:
                self._ledger.require_fresh_inputs(stage)
            except EngineError:
                self.stale_refusals += 1
                raise
            self._run(stage)

    def read(self, name: str) -> np.ndarray:
        """A host copy of buffer `name`; StaleInputError if a stage that it follows from is stale.

        bfloat16 and float8 buffers are returned as float32, which represents every value of theirs.
        """
        self.contract.buffer(name)
        with self._exclusively(f"read '{name}'"):
            try:
                self._ledger.require_fresh(name)
            except EngineError:
                self.stale_refusals += 1
                raise
            return self._host_copy(name)

    @property
    def arena(self) -> Arena:
        """Every buffer as a tensor on the device; StateError after `close`."""
        if self._arena is None:
            raise StateError("the session is closed; build a new one")
        return self._arena

    # -- asking ----------------------------------------------------------------------------------------------------

    @property
    def variant(self) -> str:
        """The selected shape key."""
        return self._ledger.variant

    @property
    def versions(self) -> dict[str, int]:
        """A copy of every buffer's version."""
        return dict(self._ledger.versions)

    @property
    def fingerprint(self) -> str:
        """The contract's fingerprint."""
        return self.contract.fingerprint

    def is_stale(self, stage: str) -> bool:
        """Whether `act` would replay `stage` because of its own inputs."""
        self.contract.stage(stage)
        return self._ledger.is_stale(stage)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _run(self, stage: str) -> None:
        if self._graphs is None:
            raise StateError("the session is not configured; call configure() first")
        try:
            self._graphs.replay(stage, self._ledger.variant)
        except BaseException:
            self._ledger.failed(stage)
            raise
        self._ledger.ran(stage)
        self.counts[stage] += 1

    def _host_copy(self, name: str) -> np.ndarray:
        window = self._windows.get(name)
        if window is not None:
            window.download()
            return window.array.copy()
        tensor = self.arena[name]
        if tensor.dtype in (torch.bfloat16, torch.float8_e4m3fn):
            tensor = tensor.float()
        host: np.ndarray = tensor.cpu().numpy().copy()
        return host

    def _input_window(self, name: str) -> Window:
        self._require_open()
        if not self.contract.buffer(name).filled_by_host:
            role = self.contract.buffer(name).role.name
            writers = ", ".join(s.name for s in self.contract.writers.get(name, ()))
            owner = f"written by stage {writers}" if writers else "prepared before configure"
            raise RoleError(f"'{name}' is a {role} buffer {owner}; the host fills SWAP windows only")
        return self._windows[name]

    def _is_read(self, name: str) -> bool:
        return any(name in stage.reads for stage in self.contract.stages)

    def _require_filled(self) -> None:
        if self._graphs is None:
            self._require_open()
            raise StateError("the session is not configured; call configure() first")
        if self._unfilled:
            names = ", ".join(sorted(self._unfilled))
            raise UnfilledWindowError(f"never filled: {names}; fill every window before the first act()")

    def _require_open(self) -> None:
        if self._closed:
            raise StateError("the session is closed; build a new one")

    @contextmanager
    def _exclusively(self, action: str) -> Iterator[None]:
        self._require_open()
        if not self._driving.acquire(blocking=False):
            raise StateError(
                f"cannot {action}: the session is being driven already (another thread, or a stage body)"
            )
        try:
            yield
        finally:
            self._driving.release()
