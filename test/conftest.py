"""What every test process shares."""

from __future__ import annotations

import torch

torch.set_num_threads(1)  # tests run side by side; more threads than cores only wait for each other
