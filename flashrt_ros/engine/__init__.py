"""The engine: fixed addresses, captured stages, and a session that replays exactly what is stale.

It needs torch and knows no model.
"""

from .arena import Arena, arena_offsets
from .capsule import Capsule, Tier
from .cview import CView
from .devices import memory_refusals, require_memory, resolve_device
from .errors import (
    BudgetFullError,
    BusyError,
    CapsuleError,
    CapsuleExistsError,
    CapsuleFileError,
    CapsuleKeptError,
    CapsuleNameError,
    CapsuleStorageError,
    ClosedError,
    DeviceError,
    DiskFullError,
    DriverError,
    EngineError,
    FingerprintError,
    ForeignFileError,
    ReadOnlyError,
    RoleError,
    SessionExistsError,
    SessionLimitError,
    StaleInputError,
    StaleVariantError,
    StateError,
    UncapturedShapeError,
    UnfilledWindowError,
    UnknownCapsuleError,
    UnknownSessionError,
    WindowError,
)
from .float32 import exact_float32
from .folder import CapsuleFolder
from .graphs import StageBody, recording_into
from .manager import SessionManager
from .session import Session
from .store import CapsuleStore
from .windows import WindowPath, choose_path

__all__ = [
    "Arena",
    "BudgetFullError",
    "BusyError",
    "CView",
    "Capsule",
    "CapsuleError",
    "CapsuleExistsError",
    "CapsuleFileError",
    "CapsuleFolder",
    "CapsuleKeptError",
    "CapsuleNameError",
    "CapsuleStorageError",
    "CapsuleStore",
    "ClosedError",
    "DeviceError",
    "DiskFullError",
    "DriverError",
    "EngineError",
    "FingerprintError",
    "ForeignFileError",
    "ReadOnlyError",
    "RoleError",
    "Session",
    "SessionExistsError",
    "SessionLimitError",
    "SessionManager",
    "StageBody",
    "StaleInputError",
    "StaleVariantError",
    "StateError",
    "Tier",
    "UncapturedShapeError",
    "UnfilledWindowError",
    "UnknownCapsuleError",
    "UnknownSessionError",
    "WindowError",
    "WindowPath",
    "arena_offsets",
    "choose_path",
    "exact_float32",
    "memory_refusals",
    "recording_into",
    "require_memory",
    "resolve_device",
]
