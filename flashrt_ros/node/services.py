"""The five capsule services: requests in, numbered causes out.

Each request runs in a thread of its own, so that nothing else waits for it; the desk serves one at a time.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any

from builtin_interfaces.msg import Time
from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.node import Node
from rclpy.task import Future

from ..engine import (
    BudgetFullError,
    BusyError,
    CapsuleExistsError,
    CapsuleFileError,
    CapsuleKeptError,
    CapsuleNameError,
    CapsuleStorageError,
    DiskFullError,
    FingerprintError,
    ForeignFileError,
    ReadOnlyError,
    SessionExistsError,
    SessionLimitError,
    Tier,
    UnknownCapsuleError,
    UnknownSessionError,
)
from ..msg import Capsule, CapsuleResult
from ..srv import DropCapsule, Fork, ListCapsules, Restore, Snapshot
from .capsule_desk import CapsuleDesk, InactiveError, Listed, NothingToSaveError
from .worker import WorkerBusyError

# The first row that fits decides, so a kind comes before the kind that it belongs to.
CAUSES: tuple[tuple[type[Exception], int], ...] = (
    (CapsuleNameError, CapsuleResult.BAD_NAME),
    (UnknownCapsuleError, CapsuleResult.UNKNOWN_NAME),
    (CapsuleExistsError, CapsuleResult.ALREADY_EXISTS),
    (CapsuleKeptError, CapsuleResult.KEPT),
    (BudgetFullError, CapsuleResult.BUDGET_FULL),
    (FingerprintError, CapsuleResult.FINGERPRINT_MISMATCH),
    (ForeignFileError, CapsuleResult.FILE_FOREIGN),
    (CapsuleFileError, CapsuleResult.FILE_CORRUPT),
    (DiskFullError, CapsuleResult.DISK_FULL),
    (ReadOnlyError, CapsuleResult.READ_ONLY),
    (CapsuleStorageError, CapsuleResult.FILE_ERROR),
    (UnknownSessionError, CapsuleResult.UNKNOWN_SESSION),
    (SessionExistsError, CapsuleResult.ALREADY_EXISTS),
    (SessionLimitError, CapsuleResult.TOO_MANY_SESSIONS),
    (InactiveError, CapsuleResult.INACTIVE),
    (NothingToSaveError, CapsuleResult.NOTHING_TO_SAVE),
    (WorkerBusyError, CapsuleResult.BUSY),
    (BusyError, CapsuleResult.MID_STAGE),
)
TIERS = {Tier.DEVICE: Capsule.DEVICE, Tier.HOST: Capsule.HOST, None: Capsule.DISK}
_SECOND = 1_000_000_000


class CapsuleServices:
    """`snapshot`, `restore`, `fork`, `~/list_capsules` and `~/drop_capsule` of one configured node.

    Args:
        node: that serves them.
        desk: that does the work.
        timeout: longest wait of a request for another one to be done (s).
    """

    def __init__(self, node: Node, desk: CapsuleDesk, timeout: float) -> None:
        self._node, self._desk, self._timeout = node, desk, timeout
        self._one_at_a_time = threading.Lock()
        self._group = ReentrantCallbackGroup()
        self._services = [
            self._serve(Snapshot, "snapshot", self._snapshot),
            self._serve(Restore, "restore", self._restore),
            self._serve(Fork, "fork", self._fork),
            self._serve(ListCapsules, "~/list_capsules", self._list),
            self._serve(DropCapsule, "~/drop_capsule", self._drop),
        ]

    def close(self) -> None:
        """Take all of them down."""
        for service in self._services:
            self._node.destroy_service(service)

    # -- what each one does ----------------------------------------------------------------------------------------

    def _snapshot(self, request: Any, response: Any) -> str:
        listed = self._desk.snapshot(
            request.name,
            description=request.description,
            session=request.session,
            keep=request.keep,
            durable=request.durable,
            replace=request.replace,
        )
        response.capsule = self._message(listed)
        where = " and its file" if listed.durable else ""
        return f"saved {listed.nbytes} bytes as '{listed.name}'{where}"

    def _restore(self, request: Any, response: Any) -> str:
        response.epoch = self._desk.restore(request.name, request.session)
        return f"continuing from '{request.name}'"

    def _fork(self, request: Any, response: Any) -> str:
        response.epoch = self._desk.fork(request.name, request.session, switch_to=request.switch_to)
        return f"session '{request.session}' begins from {repr(request.name) if request.name else 'the live state'}"

    def _list(self, request: Any, response: Any) -> str:
        listed, store = self._desk.list(), self._desk.store
        response.capsules = [self._message(capsule) for capsule in listed]
        response.device_bytes, response.host_bytes = store.used(Tier.DEVICE), store.used(Tier.HOST)
        response.disk_bytes = self._desk.folder.nbytes()
        response.budget_bytes = store.budget(Tier.DEVICE) + store.budget(Tier.HOST)
        return f"{len(listed)} capsules"

    def _drop(self, request: Any, response: Any) -> str:
        response.freed_bytes = self._desk.drop(request.name, drop_kept=request.drop_kept)
        return f"dropped '{request.name}', {response.freed_bytes} bytes"

    # -- around it -------------------------------------------------------------------------------------------------

    def _serve(self, kind: Any, name: str, work: Callable[[Any, Any], str]) -> Any:
        async def answer(request: Any, response: Any) -> Any:
            answered = Future()

            def run() -> None:
                response.result = self._outcome(work, request, response)
                answered.set_result(None)
                self._node._wake_executor()

            threading.Thread(target=run, name=name, daemon=True).start()
            await answered
            return response

        return self._node.create_service(kind, name, answer, callback_group=self._group)

    def _outcome(self, work: Callable[[Any, Any], str], request: Any, response: Any) -> CapsuleResult:
        if not self._one_at_a_time.acquire(timeout=self._timeout):
            text = f"another capsule request was served for {self._timeout:g} s; ask again later"
            return CapsuleResult(cause=CapsuleResult.BUSY, message=text)
        try:
            return CapsuleResult(cause=CapsuleResult.SUCCESS, message=work(request, response))
        except Exception as error:
            if isinstance(error, FingerprintError):
                response.differing_fields = list(error.fields)
            return self._refusal(error)
        finally:
            self._one_at_a_time.release()

    def _refusal(self, error: Exception) -> CapsuleResult:
        for kind, cause in CAUSES:
            if isinstance(error, kind):
                return CapsuleResult(cause=cause, message=str(error))
        self._node.get_logger().error(f"a capsule request broke off, a fault of the node:\n{traceback.format_exc()}")
        text = f"{type(error).__name__}: {error}; the node's log has the traceback"
        return CapsuleResult(cause=CapsuleResult.INTERNAL, message=text)

    def _message(self, listed: Listed) -> Capsule:
        notes = listed.notes
        seconds, nanoseconds = divmod(int(notes.get("created_ns", listed.created_ns)), _SECOND)
        return Capsule(
            name=listed.name,
            description=listed.description,
            created=Time(sec=seconds, nanosec=nanoseconds),
            fingerprint=listed.fingerprint,
            compatible=listed.fingerprint == self._desk.fingerprint,
            session=notes.get("session", ""),
            epoch=int(notes.get("epoch", 0)),
            chunk_id=int(notes.get("chunk_id", 0)),
            instruction=notes.get("instruction", ""),
            bytes=listed.nbytes,
            tier=TIERS[listed.tier],
            keep=listed.keep,
            durable=listed.durable,
        )
