"""LeRobot's π0.5 at its true widths and dtypes, but short: what goes wrong in its kernels does so here, in seconds."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.drop_in_models import Setting, Workload, lerobot_pi05


class Short(Setting):
    """True sizes but for the vocabulary, and two layers a stack."""

    def pick(self, true: Any, tiny: Any) -> Any:
        """The true one; where sizes are asked for, those that differ from the defaults."""
        return {"vision_layers": 2, "layers": 2, "vocabulary": 1000} if true == {} else true


def short_pi05(device: torch.device) -> Workload:
    """2 views, 200 prompt tokens, chunk 10, 10 steps, bfloat16."""
    return lerobot_pi05(Short(device, tiny=False))
