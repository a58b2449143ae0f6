"""Making unmodified PyTorch models faster, behind gates of parity and latency, with a receipt.

    from flashrt_ros.accelerate import accelerate

    report = accelerate(model, examples)
    with report:
        model(...)

The function and the package have one name: `flashrt_ros.accelerate.accelerate` is the function.
"""

from .api import DEFAULT_KINDS, accelerate, replay
from .errors import AccelerateError, CaptureError, DeviceFaultError, ReceiptError
from .gates import Gates
from .receipt import Receipt, Verdict
from .registry import available_structures, register, registered, unregister
from .report import Report
from .structure import KINDS, Match, ModuleStructure, Observation, Scene, Site, Structure, Unsuitable

__all__ = [
    "DEFAULT_KINDS",
    "KINDS",
    "AccelerateError",
    "CaptureError",
    "DeviceFaultError",
    "Gates",
    "Match",
    "ModuleStructure",
    "Observation",
    "Receipt",
    "ReceiptError",
    "Report",
    "Scene",
    "Site",
    "Structure",
    "Unsuitable",
    "Verdict",
    "accelerate",
    "available_structures",
    "register",
    "registered",
    "replay",
    "unregister",
]
