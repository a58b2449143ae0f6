"""The execution contract: what a policy computes, at which rates, in which named buffers.

Pure data and checks. It imports neither torch nor numpy, so that a plan can be read, compared and refused anywhere.
"""

from .buffers import Buffer, DType, Rate, Role
from .contract import Contract
from .errors import ContractError
from .formats import WIDE, SiteFormat
from .identity import Identity
from .regions import Extent, Region
from .show import show
from .stages import Stage, Variant

__all__ = [
    "WIDE",
    "Buffer",
    "Contract",
    "ContractError",
    "DType",
    "Extent",
    "Identity",
    "Rate",
    "Region",
    "Role",
    "SiteFormat",
    "Stage",
    "Variant",
    "show",
]
