"""A contract's buffers, stages and regions as C tables."""

from __future__ import annotations

import ctypes

from ..contract import Buffer, Region, Stage
from ..contract.graph import rate_of
from .cabi import DTYPE_CODES, RATE_CODES, ROLE_CODES, BufferView, RegionView, StageView
from .session import Session


class PlanTables:
    """The arrays that a `flashrt_contract` points to: buffers and regions as declared, stages in execution order."""

    def __init__(self, session: Session) -> None:
        contract = session.contract
        self._session, self._contract = session, contract
        self._index = {buffer.name: i for i, buffer in enumerate(contract.buffers)}
        self.buffers = (BufferView * len(contract.buffers))(*map(self._buffer, contract.buffers))
        self.stages = (StageView * len(contract.order))(*map(self._stage, contract.order))
        self.regions = (RegionView * len(contract.regions))(*map(self._region, contract.regions))

    def _buffer(self, buffer: Buffer) -> BufferView:
        return BufferView(
            name=buffer.name.encode(),
            device_address=self._session.arena.address(buffer.name),
            host_address=self._session.host_address(buffer.name),
            shape=(ctypes.c_uint64 * len(buffer.shape))(*buffer.shape),
            nbytes=buffer.nbytes,
            rank=len(buffer.shape),
            dtype=DTYPE_CODES[buffer.dtype],
            role=ROLE_CODES[buffer.role],
            rate=RATE_CODES[rate_of(buffer, self._contract.writers)],
            filled_by_host=buffer.filled_by_host,
        )

    def _stage(self, stage: Stage) -> StageView:
        return StageView(
            name=stage.name.encode(),
            reads=self._indices(stage.reads),
            writes=self._indices(stage.writes),
            read_count=len(stage.reads),
            write_count=len(stage.writes),
            rate=RATE_CODES[stage.rate],
        )

    def _region(self, region: Region) -> RegionView:
        extent = self._contract.extent(region.live) if region.live is not None else None
        return RegionView(
            name=region.name.encode(),
            live_extent=extent.name.encode() if extent is not None else None,
            offset=region.offset,
            nbytes=region.nbytes,
            blocks=region.blocks,
            rows=extent.maximum if extent is not None else 1,
            row_bytes=region.row_bytes(extent) if extent is not None else region.block_bytes,
            buffer=self._index[region.buffer],
        )

    def _indices(self, names: tuple[str, ...]) -> ctypes.Array[ctypes.c_uint32]:
        return (ctypes.c_uint32 * len(names))(*(self._index[name] for name in names))
