"""Fused operations: PyTorch references that define them, and the table through which stages call them."""

from .shapes import ShapeError, check
from .table import OpTable, reference_ops

__all__ = ["OpTable", "ShapeError", "check", "reference_ops"]
