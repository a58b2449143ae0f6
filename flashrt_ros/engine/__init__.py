"""The engine: fixed addresses, captured stages, and a session that replays exactly what is stale.

It needs torch and knows no model.
"""

from .arena import Arena, resolve_device
from .errors import (
    DeviceError,
    EngineError,
    RoleError,
    StaleInputError,
    StaleVariantError,
    StateError,
    UncapturedShapeError,
    UnfilledWindowError,
    WindowError,
)
from .graphs import StageBody
from .session import Session

__all__ = [
    "Arena",
    "DeviceError",
    "EngineError",
    "RoleError",
    "Session",
    "StageBody",
    "StaleInputError",
    "StaleVariantError",
    "StateError",
    "UncapturedShapeError",
    "UnfilledWindowError",
    "WindowError",
    "resolve_device",
]
