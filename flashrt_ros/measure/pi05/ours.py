"""Our policy on the same observations as the official one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...engine import Session
from ...policies.pi05 import Pi05Policy, build
from ...policies.pi05.plan import image_buffer, variant_name
from ...policies.pixels import PixelOrder
from .observations import Observation


@dataclass(frozen=True)
class Ours:
    """A policy with its session, driven with tokens and noise instead of text and a seed."""

    policy: Pi05Policy
    session: Session

    @classmethod
    def start(cls, settings: Mapping[str, Any], device: str, seed: int = 0) -> Ours:
        """Load, build a session and capture."""
        policy = build(settings, device)
        session = Session(policy.contract, policy.bodies, device, seed)
        policy.prepare(session)
        session.configure()
        return cls(policy, session)

    def fill(self, observation: Observation) -> None:
        """Bring everything that one decision takes into the windows."""
        session = self.session
        for view, pixels in observation.images.items():
            with session.window(image_buffer(view), rows=pixels.size) as window:
                window[:] = pixels.reshape(-1)
        formats = [(*pixels.shape, PixelOrder.RGB) for pixels in observation.images.values()]
        session.fill("image_format", np.array(formats, np.int32))
        self._fill_tokens(observation.tokens)
        session.fill("noise", observation.noise)

    def _fill_tokens(self, tokens: np.ndarray) -> None:
        config, session = self.policy.config, self.session
        padded = np.full(config.prompt_buckets[-1], -1, np.int32)
        padded[: len(tokens)] = tokens
        session.fill("tokens", padded)
        session.set_extent("prompt_rows", len(tokens))
        session.set_extent("prefix_rows", config.image_rows + len(tokens))
        session.select(variant_name(self.policy.processor.bucket(padded)))

    def decide(self, observation: Observation) -> np.ndarray:
        """float32[chunk, padded width]: the model's own actions."""
        self.fill(observation)
        self.session.act()
        return self.session.read("actions")

    def key_value(self) -> Tensor:
        """float32[layers, 2, valid rows, key width] of the last decision, on the device."""
        with self.session.reading("key_value") as tensor, torch.inference_mode():
            live = tensor[:, :, : self.session.extents["prefix_rows"]]
            return live.to(torch.float32, copy=True)

    def close(self) -> None:
        """Release memory and graphs."""
        self.session.close()
