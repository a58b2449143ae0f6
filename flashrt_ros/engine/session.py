"""The session: the only thing that drives a contract."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

from ..contract import Contract, Rate, Role, Stage
from .arena import Arena
from .copier import CopyRegions, copy_with_torch
from .devices import resolve_device
from .errors import (
    ClosedError,
    EngineError,
    RoleError,
    StateError,
    UncapturedShapeError,
    UnfilledWindowError,
    WindowError,
)
from .filling import FillingBlock
from .graphs import GraphSet, StageBody
from .keeper import SessionBooks, StateKeeper, static_without_writer
from .noise import Noise
from .saving import StateSaving
from .store import CapsuleStore
from .turn import Turn
from .versions import VersionLedger
from .windows import Filling, Window, WindowPath, checked, choose_path, host_copy, open_windows


class Session(StateSaving):
    """Fills windows, replays what is stale in contract order, reads results.

    Life: construct → `prepare` STATIC buffers that no stage writes → `configure` (captures everything, runs the
    CHECKPOINT stages) → hot loop → `close`. After `configure` nothing allocates, captures or rebinds. One thread at
    a time may drive a session; a second one gets BusyError instead of torn data.

    Args:
        contract: the plan.
        bodies: one body for each stage of the plan.
        device: "cpu", "cuda" or "cuda:N"; DeviceError if this machine lacks it.
        seed: of the generator that `draw` uses. It runs on the host, so a seed gives equal noise on every device.
        capsules: where snapshots go; a store with the default budgets is made when the first one is taken.
        copy_regions: how the bytes of a capsule are copied; a faster one must do exactly what `copy_with_torch` does.
        windows: how windows reach the stages; by default as `choose_path` says for the device.
    """

    def __init__(
        self,
        contract: Contract,
        bodies: Mapping[str, StageBody],
        device: str = "cpu",
        seed: int = 0,
        capsules: CapsuleStore | None = None,
        copy_regions: CopyRegions = copy_with_torch,
        windows: WindowPath | None = None,
    ) -> None:
        self.contract = contract
        self.device = resolve_device(device)
        self._arena: Arena | None = Arena(contract, self.device)
        self._noise = Noise(seed)
        self.extents: dict[str, int] = {extent.name: 0 for extent in contract.extents}
        self.counts: Counter[str] = Counter({stage.name: 0 for stage in contract.stages})
        self.stale_refusals = 0
        self.notes: dict[str, str] = {}
        self._capsules = capsules
        self._bodies = bodies
        self._order = tuple(stage.name for stage in contract.order)
        self._variants = dict.fromkeys(variant.name for variant in contract.variants)
        self._maxima = {extent.name: extent.maximum for extent in contract.extents}
        self._following: dict[str, frozenset[str]] = {}
        self._windows: dict[str, Window] = open_windows(contract, self.arena, choose_path(self.device, windows))
        self._inputs = {name: window for name, window in self._windows.items() if window.buffer.filled_by_host}
        self._in_flight = {stage.name: self._read_in_place(stage) for stage in contract.stages}
        self._ledger = VersionLedger(contract, contract.variants[0].name)
        self._unfilled = set(self._inputs)
        books = SessionBooks(self._ledger, self.extents, self._noise, self.notes, self._unfilled)
        self._keeper = StateKeeper(contract, self.arena, self._windows, books, copy_regions)
        self._graphs: GraphSet | None = None
        self._closed = False
        self._driving = Turn()

    # -- life ------------------------------------------------------------------------------------------------------

    def prepare(self, name: str, value: torch.Tensor) -> None:
        """Copy `value` into STATIC buffer `name`, before `configure` only (its update event)."""
        buffer = self.contract.buffer(name)
        if buffer.role is not Role.STATIC or name in self.contract.writers:
            raise RoleError(f"'{name}' is not a STATIC buffer without a writer; only those are prepared by hand")
        if self._graphs is not None:
            raise RoleError(f"STATIC buffer '{name}' is read-only after configure; prepare it before, in a new session")
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
        for name in static_without_writer(self.contract):
            if self._ledger.state.versions[name] == 0:
                raise UnfilledWindowError(f"STATIC buffer '{name}' was not prepared; call prepare() first")
        self._graphs = GraphSet(self.contract, self._bodies, self.arena, self.device)
        for buffer in self.contract.buffers:
            if buffer.role is Role.STATE:  # capturing ran the bodies, which may have accumulated into it
                self.arena[buffer.name].zero_()
        for stage in self.contract.order:
            if stage.rate is Rate.CHECKPOINT and not self._unfilled.intersection(stage.reads):
                self._run(stage.name)

    def close(self) -> None:
        """Release graphs and memory. Safe to call twice."""
        if self._closed:
            return
        with self._exclusively("close"):
            self._closed = True
            self._graphs = None
            windows, self._windows, self._inputs, self._in_flight = self._windows, {}, {}, {}
            self._bodies = {}
            del self._keeper
            self._arena = None
            for window in windows.values():
                window.wait()  # then its memory goes, and may be handed out again at once

    # -- filling ---------------------------------------------------------------------------------------------------

    def window(self, name: str, rows: int | None = None) -> FillingBlock[np.ndarray]:
        """`with` gives the host memory of window `name` to be written in place; its end makes readers stale.

        Args:
            rows: only the first `rows` rows of axis 0 are given and sent to the device; all by default.
        """
        filling = Filling(self._input_window(name), rows)
        return FillingBlock(filling, filling.array, self._driving, self._ledger, self._unfilled)

    def filling(self, name: str, rows: int | None = None) -> FillingBlock[Filling]:
        """Like `window`, for a writer that learns only while it writes how many rows there are: it sets `rows`."""
        filling = Filling(self._input_window(name), rows)
        return FillingBlock(filling, filling, self._driving, self._ledger, self._unfilled)

    def fill(self, name: str, value: np.ndarray) -> None:
        """Copy `value` (exact shape and dtype) into window `name`, once."""
        value = checked(self._input_window(name), value)
        with self.window(name) as target:
            np.copyto(target, value)

    def draw(self, name: str = "noise") -> None:
        """Refill float32 window `name` with N(0, 1) from the session's generator."""
        window = self._input_window(name)
        if window.tensor.dtype is not torch.float32:
            raise WindowError(f"window '{name}' is {window.tensor.dtype}, noise is drawn into float32 windows only")
        with self.window(name):
            self._noise.draw(window.tensor)
            self._let_go()

    def seed(self, seed: int) -> None:
        """Restart the noise generator."""
        self._noise.seed(seed)

    def select(self, variant: str) -> None:
        """Choose the shape key of the next replays; UncapturedShapeError if it was not captured."""
        if variant not in self._variants:
            captured = ", ".join(self._variants)
            raise UncapturedShapeError(f"shape '{variant}' was not captured; captured at configure: {captured}")
        self._ledger.variant = variant

    def set_extent(self, name: str, value: int) -> None:
        """Say how many rows of extent `name` are live."""
        maximum = self._maxima.get(name) or self.contract.extent(name).maximum
        if not 0 <= value <= maximum:
            raise WindowError(f"extent '{name}' is {value}, expected 0 to {maximum}")
        if self.extents[name] != value:
            self.extents[name] = value
            self._keeper.touch_extent(name)

    # -- driving ---------------------------------------------------------------------------------------------------

    def act(self, apart_from: str | None = None) -> tuple[str, ...]:
        """Replay exactly the stale stages, in contract order, and return their names.

        Args:
            apart_from: leave out every stage that follows from this buffer, so that the host can fill it while the
                device works on the others; `act()` replays the rest.
        """
        left_out = frozenset[str]() if apart_from is None else self._followers(apart_from)
        with self._exclusively("act"):
            self._require_configured()
            is_stale = self._ledger.is_stale
            replayed = []
            for stage in self._order:
                if stage not in left_out and is_stale(stage):
                    self._run(stage)
                    replayed.append(stage)
            return tuple(replayed)

    def replay(self, stage: str) -> None:
        """Replay one stage by hand; StaleInputError if what it would read is stale."""
        self.contract.stage(stage)
        with self._exclusively(f"replay '{stage}'"):
            self._require_configured()
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
        window = self._windows.get(name)
        if window is None:
            with self.reading(name) as tensor:
                return host_copy(tensor)
        with self._exclusively(f"read '{name}'"):
            self._require_fresh(name)
            return window.read()

    @contextmanager
    def reading(self, name: str) -> Iterator[torch.Tensor]:
        """Yield buffer `name` as it is on the device, while nothing else drives; StaleInputError as of `read`."""
        self.contract.buffer(name)
        with self._exclusively(f"read '{name}'"):
            self._require_fresh(name)
            yield self.arena[name]

    # -- asking ----------------------------------------------------------------------------------------------------

    @property
    def unfilled(self) -> frozenset[str]:
        """Input windows that nobody filled since configure, or that a restore left without their content."""
        return frozenset(self._unfilled)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def arena(self) -> Arena:
        """Every buffer as a tensor on the device; ClosedError after `close`."""
        if self._arena is None:
            raise ClosedError("the session is closed; build a new one")
        return self._arena

    def host_address(self, name: str) -> int | None:
        """Address of the host's side of SWAP window `name`, which never moves; None for any other buffer."""
        window = self._windows.get(name)
        return None if window is None else window.array.ctypes.data

    def window_path(self, name: str) -> WindowPath:
        """How what the host writes into SWAP window `name` reaches the stages."""
        if self.contract.buffer(name).role is not Role.SWAP:
            raise RoleError(
                f"'{name}' is a {self.contract.buffer(name).role.name} buffer, only SWAP buffers are windows"
            )
        self._require_open()
        return self._windows[name].path

    @property
    def variant(self) -> str:
        """The selected shape key."""
        return self._ledger.variant

    @property
    def versions(self) -> dict[str, int]:
        """A copy of every buffer's version."""
        return dict(self._ledger.state.versions)

    def content(self, name: str) -> int:
        """A number for what buffer `name` holds. Where two of this process are equal, so are the bytes."""
        return self._ledger.content(self.contract.buffer(name).name)

    @property
    def fingerprint(self) -> str:
        """The contract's fingerprint."""
        return self.contract.fingerprint

    def is_stale(self, stage: str) -> bool:
        """Whether `act` would replay `stage` because of its own inputs."""
        self.contract.stage(stage)
        return self._ledger.is_stale(stage)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _require_fresh(self, name: str) -> None:
        try:
            self._ledger.require_fresh(name)
        except EngineError:
            self.stale_refusals += 1
            raise

    def _run(self, stage: str) -> None:
        graphs = self._require_configured()
        if self._unfilled:
            self._require_filled(stage)
        try:
            graphs.replay(stage, self._ledger.variant)
        except BaseException:
            self._ledger.failed(stage)
            raise
        for window in self._in_flight[stage]:
            window.mark_read()
        self._ledger.ran(stage)
        self.counts[stage] += 1

    def _read_in_place(self, stage: Stage) -> tuple[Window, ...]:
        """Mapped windows that `stage` reads: they may be written again when its replay has ended."""
        used = (self._windows.get(name) for name in stage.reads)
        return tuple(window for window in used if window is not None and window.path is WindowPath.MAPPED)

    def _followers(self, buffer: str) -> frozenset[str]:
        found = self._following.get(buffer)
        if found is None:
            found = self._following[buffer] = frozenset(stage.name for stage in self.contract.followers(buffer))
        return found

    def _input_window(self, name: str) -> Window:
        window = self._inputs.get(name)
        if window is None:
            self._require_open()
            role = self.contract.buffer(name).role.name
            writers = ", ".join(s.name for s in self.contract.writers.get(name, ()))
            owner = f"written by stage {writers}" if writers else "prepared before configure"
            raise RoleError(f"'{name}' is a {role} buffer {owner}; the host fills SWAP windows only")
        return window

    def _require_configured(self) -> GraphSet:
        if self._graphs is None:
            self._require_open()
            raise StateError("the session is not configured; call configure() first")
        return self._graphs

    def _require_filled(self, stage: str) -> None:
        missing = self._unfilled.intersection(self.contract.stage(stage).reads)
        if missing:
            names = ", ".join(sorted(missing))
            raise UnfilledWindowError(
                f"stage '{stage}' needs windows that nobody filled since configure or restore: {names}; fill them first"
            )

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the session is closed; build a new one")

    def _exclusively(self, action: str) -> Turn:
        self._require_open()
        return self._driving.begin(action)
