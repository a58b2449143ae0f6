"""The contract's element types as torch's."""

import torch

from ..contract import DType

TORCH_DTYPE: dict[DType, torch.dtype] = {dtype: getattr(torch, dtype.value) for dtype in DType}
