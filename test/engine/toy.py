"""A toy policy whose every stage is arithmetic that a test can redo by hand."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from flashrt_ros.contract import Variant
from flashrt_ros.engine import Session, StageBody
from flashrt_ros.engine.copier import CopyRegions, copy_with_torch

from ..contract.builders import make_contract

Tensors = Mapping[str, torch.Tensor]


def tables(buffers: Tensors, variant: Variant) -> None:
    buffers["table"].copy_(torch.arange(4.0, device=buffers["table"].device))


def prompt(buffers: Tensors, variant: Variant) -> None:
    live = variant.dims["tokens"]
    buffers["prompt"].zero_()
    buffers["prompt"][:live].copy_(buffers["tokens"][:live])


def context(buffers: Tensors, variant: Variant) -> None:
    pixel = buffers["image"].float().mean()
    buffers["kv"].copy_((buffers["prompt"] + pixel).expand(2, 6, 4))


def action(buffers: Tensors, variant: Variant) -> None:
    buffers["hidden"].copy_(buffers["kv"].sum(dim=(0, 1)))
    buffers["actions"].copy_(buffers["hidden"] + buffers["noise"] + buffers["table"])


BODIES = {"tables": tables, "prompt": prompt, "context": context, "action": action}


def expected(image: np.ndarray, tokens: np.ndarray, noise: np.ndarray, live: int = 2) -> np.ndarray:
    """What the toy computes, recomputed from nothing in numpy."""
    seen = np.where(np.arange(4) < live, tokens, 0).astype(np.float32)
    result: np.ndarray = 12 * (seen + image.astype(np.float32).mean()) + noise + np.arange(4, dtype=np.float32)
    return result


def image(value: int) -> np.ndarray:
    return np.full(8, value, np.uint8)


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def make_session(
    seed: int = 0, bodies: Mapping[str, StageBody] = BODIES, copy_regions: CopyRegions = copy_with_torch
) -> Session:
    """Configured, with every window filled once."""
    session = Session(make_contract(), bodies, seed=seed, copy_regions=copy_regions)
    session.configure()
    session.fill("image", image(1))
    session.fill("tokens", tokens(5, 6, 7, 8))
    session.draw("noise")
    return session
