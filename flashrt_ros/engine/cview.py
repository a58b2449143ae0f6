"""A live session, exported to C and C++ code in the same process (include/flashrt_contract.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from .cabi import ABI_VERSION, CALLBACKS, CAPSULE_NAME, DEVICE_CODES, ContractView, Status
from .ctables import PlanTables
from .errors import (
    BusyError,
    ClosedError,
    EngineError,
    RoleError,
    StaleInputError,
    StateError,
    UnfilledWindowError,
    WindowError,
)
from .session import Session
from .windows import Filling

_T = TypeVar("_T")

# The first class that fits decides, so subclasses come before their bases.
_STATUS_OF: tuple[tuple[type[BaseException], Status], ...] = (
    (ClosedError, Status.CLOSED),
    (BusyError, Status.BUSY),
    (StateError, Status.NOT_CONFIGURED),
    (StaleInputError, Status.STALE),
    (UnfilledWindowError, Status.UNFILLED),
    (RoleError, Status.NOT_A_WINDOW),
    (WindowError, Status.DOES_NOT_FIT),
    (Exception, Status.FAILED),
    (BaseException, Status.INTERRUPTED),
)
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


class CView:
    """An immutable C view of `session`: its plan, its addresses, and callbacks that drive it.

    Keep this object for as long as C code holds the address: the view's memory and its callbacks belong to it. Once
    the session or the view was closed, every callback answers FLASHRT_CLOSED. The callbacks put their work on the
    CUDA stream that is current when the view is made, so make it under the stream that drives the session.

    Prompts, shape keys, extents and capsules stay with Python; C code sees what they change in the versions.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lent: _Lent | None = None
        self._message = ""
        self._closed = False
        on_gpu = session.device.type == "cuda"
        self._stream = torch.cuda.current_stream(session.arena.storage.device) if on_gpu else None
        self._tables = PlanTables(session)
        self._callbacks = {name: CALLBACKS[name](self._answering(body)) for name, body in self._bodies().items()}
        self._view = ContractView()
        self._fill_view()

    def _bodies(self) -> Mapping[str, Callable[..., None]]:
        return {
            "begin_fill": self._begin_fill,
            "filled": self._filled,
            "draw": self._draw,
            "act": self._act,
            "read": self._read,
            "version_of": self._version_of,
            "live_rows": self._live_rows,
            "last_error": self._last_error,
        }

    def _fill_view(self) -> None:
        view, tables, contract = self._view, self._tables, self._session.contract
        view.abi_version, view.struct_size = ABI_VERSION, ctypes.sizeof(ContractView)
        view.name, view.fingerprint = contract.name.encode(), contract.fingerprint.encode()
        view.device_type = DEVICE_CODES[self._session.device.type]
        if self._stream is not None:
            view.device_index, view.stream = self._stream.device_index, self._stream.cuda_stream
        view.buffers, view.buffer_count = tables.buffers, len(tables.buffers)
        view.stages, view.stage_count = tables.stages, len(tables.stages)
        view.regions, view.region_count = tables.regions, len(tables.regions)
        view.context = self.address
        for name, callback in self._callbacks.items():
            setattr(view, name, callback)

    @property
    def address(self) -> int:
        """Address of the `flashrt_contract`, valid while this object lives."""
        return ctypes.addressof(self._view)

    @property
    def capsule(self) -> object:
        """A new PyCapsule named "flashrt_ros.contract.v1" around `address`. It does not keep this object alive."""
        capsule: object = _new_capsule(self.address, CAPSULE_NAME, None)
        return capsule

    def close(self) -> None:
        """Take a lent window back, and answer FLASHRT_CLOSED from now on. Safe to call twice.

        The session goes on. A window that was lent counts as changed, because nobody knows what was written to it.
        """
        self._closed = True
        lent, self._lent = self._lent, None
        if lent is not None:
            with self._on_stream():
                lent.give_back(torn=True)

    def __enter__(self) -> CView:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- answering -------------------------------------------------------------------------------------------------

    def _answering(self, body: Callable[..., None]) -> Callable[..., None]:
        """`body` as a callback: nothing that it raises crosses into C."""

        def answer(context: int | None, *arguments: Any) -> None:
            status = arguments[-1]
            if not status:
                return
            try:
                self._require_context(context)
                with self._on_stream():
                    body(*arguments[:-1])
                status[0] = Status.OK
            except BaseException as error:
                status[0] = self._refused(error)

        return answer

    def _require_context(self, context: int | None) -> None:
        if context != self.address:
            raise _RefusedError(Status.BAD_ARGUMENT, "`context` is not that of this contract; pass contract->context")

    def _refused(self, error: BaseException) -> Status:
        self._message = str(error) or type(error).__name__
        if isinstance(error, _RefusedError):
            return error.status
        return next(status for kind, status in _STATUS_OF if isinstance(error, kind))

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    # -- the callbacks ---------------------------------------------------------------------------------------------

    def _begin_fill(self, index: int, address: Any) -> None:
        name = self._buffer(index)
        _require_pointer("address", address)
        self._lent = _Lent(index, self._session.filling(name))
        address[0] = self._tables.buffers[index].host_address

    def _filled(self, index: int, rows: int) -> None:
        name, lent = self._buffer(index), self._lent
        if lent is None or lent.index != index:
            raise _RefusedError(Status.NOT_BEGUN, f"'{name}' was not lent; call flashrt_begin_fill, write, then this")
        lent.filling.rows = rows
        self._lent = None
        lent.give_back()

    def _draw(self, index: int) -> None:
        self._session.draw(self._buffer(index))

    def _act(self) -> None:
        self._require_open()
        self._session.act()

    def _read(self, index: int, offset: int, nbytes: int, target: int | None) -> None:
        name = self._buffer(index)
        _require_pointer("target", target)
        size = self._tables.buffers[index].nbytes
        if not 0 < nbytes <= size - offset:
            text = f"bytes [{offset}, {offset + nbytes}) of '{name}' were asked for, it has {size}; ask for 1 to {size}"
            raise _RefusedError(Status.OUT_OF_RANGE, text)
        with self._session.reading(name) as tensor:
            raw = tensor.reshape(-1).view(torch.uint8)[offset : offset + nbytes].cpu()
            ctypes.memmove(target, raw.data_ptr(), nbytes)  # type: ignore[arg-type]

    def _version_of(self, index: int, version: Any) -> None:
        name = self._buffer(index)
        _require_pointer("version", version)
        version[0] = self._session.versions[name]

    def _live_rows(self, index: int, rows: Any) -> None:
        live = self._item("region", index, self._session.contract.regions, Status.UNKNOWN_REGION).live
        _require_pointer("rows", rows)
        rows[0] = 1 if live is None else self._session.extents[live]

    def _last_error(self, text: Any, capacity: int) -> None:
        _require_pointer("text", text if capacity else None)
        whole = self._message.encode(errors="replace")
        kept = whole[: capacity - 1].decode(errors="ignore").encode() + b"\0"  # never half a character
        ctypes.memmove(text, kept, len(kept))

    def _buffer(self, index: int) -> str:
        return self._item("buffer", index, self._session.contract.buffers, Status.UNKNOWN_BUFFER).name

    def _item(self, kind: str, index: int, items: Sequence[_T], unknown: Status) -> _T:
        self._require_open()
        if index >= len(items):
            raise _RefusedError(unknown, f"{kind} {index} was asked for; there are {len(items)}, counted from 0")
        return items[index]

    def _require_open(self) -> None:
        if self._closed or self._session.closed:
            raise ClosedError("the session or its view was closed; ask the host process for a new one")


class _RefusedError(EngineError):
    """A refusal that only the C interface knows."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Lent:
    """A window in the hands of C code; the session is held by it, at most until nobody holds this."""

    _held: AbstractContextManager[Filling] | None = None

    def __init__(self, index: int, held: AbstractContextManager[Filling]) -> None:
        self.index = index
        self.filling = held.__enter__()
        self._held = held

    def give_back(self, *, torn: bool = False) -> None:
        held, self._held = self._held, None
        if held is not None:
            error = EngineError("the window was taken back before it was filled") if torn else None
            held.__exit__(None if error is None else type(error), error, None)

    def __del__(self) -> None:
        self.give_back(torn=True)


def _require_pointer(name: str, pointer: object) -> None:
    if not pointer:
        raise _RefusedError(Status.BAD_ARGUMENT, f"`{name}` is NULL or has no room; pass memory to answer into")
