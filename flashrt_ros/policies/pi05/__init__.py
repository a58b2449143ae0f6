"""π0.5: a vision-language prefix encoder and a flow-matching action expert."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from ...contract import Identity
from ...engine import memory_refusals, require_memory, resolve_device
from ...ops import OpTable
from ...ops.requirements import require_kernels
from ..progress import progress
from .checkpoint import Normalisers
from .config import Pi05Config
from .lerobot import read_normalisers
from .memory import needed_bytes
from .openpi import is_openpi, read_openpi_normalisers
from .policy import Loaded, Pi05Policy, assemble, pads, wide_identity
from .presets import SEEDED_PRESETS
from .processor import Pi05Processor
from .seeded import seeded_normalisers, seeded_source
from .settings import Resolved, resolve, tokenizer_path
from .source import FileSource, TensorSource, digest
from .tokenizer import Tokenizer
from .weights import Pi05Weights, load_weights

__all__ = ["BUILD_PARTS", "Pi05Config", "Pi05Policy", "build", "identify"]

BUILD_PARTS = ("device", "checkpoint", "weights", "digest", "stages")
"""Parts of `build`, in their order: driver, context and libraries; description, tokenizer and room in memory; reading
and packing; what hashing takes longer than that; kernels and their self-test. A GPU may still work on one when the host
is in the next."""

_WORTH_A_BAR = 1 << 28  # bytes; less is read before anybody looks

Lap = Callable[[str], None]


def _no_lap(part: str) -> None:
    """Nobody measures."""


def build(
    settings: Mapping[str, object], device: str = "cpu", ops: OpTable | None = None, lap: Lap = _no_lap
) -> Pi05Policy:
    """Load a π0.5 policy.

    Args:
        settings: any fields of `Pi05Config`; `preset` alone is enough for the tiny model.
        device: "cpu", "cuda" or "cuda:N".
        ops: implementations of the ops; the PyTorch references by default.
        lap: called at the end of each of BUILD_PARTS, by whoever measures where the time goes.

    Raises:
        SettingsError: a setting is unknown, wrong, or contradicts the checkpoint.
        CheckpointError: weights or statistics are missing, corrupt or of another configuration.
        DeviceError: this machine lacks the device, or the device memory, driver or compiler that it takes.
    """
    target = resolve_device(device)
    require_kernels(target)
    lap("device")
    resolved = resolve(settings)
    config = resolved.config
    processor = Pi05Processor(config, _tokenizer(resolved), _normalisers(resolved))
    source = _source(resolved)
    if target.type == "cuda":
        require_memory(target, needed_bytes(config), f"policy 'pi05' with {len(config.views)} views")
    lap("checkpoint")
    with memory_refusals(target):
        policy = assemble(
            config,
            _load(source, config, target, lap),
            processor,
            checkpoint=str(resolved.checkpoint.folder) if resolved.checkpoint else f"preset:{config.preset}",
            device=target,
            ops=ops,
        )
    lap("stages")
    return policy


def identify(settings: Mapping[str, object]) -> tuple[Pi05Config, Identity]:
    """The configuration that `build` would load, and its identity in the wide precision; tensors are hashed, not kept.

    Kernels and architecture are left open. Raises SettingsError and CheckpointError as `build` does.
    """
    resolved = resolve(settings)
    config = resolved.config
    processor = Pi05Processor(config, _tokenizer(resolved), _normalisers(resolved))
    return config, wide_identity(config, digest(_source(resolved)), processor)


def _load(source: TensorSource, config: Pi05Config, device: torch.device, lap: Lap) -> Loaded:
    """Weights on `device`, and their digest, which the other cores compute meanwhile."""
    with ThreadPoolExecutor(1) as pool:
        hashed = pool.submit(digest, source)
        weights = _packed(source, config, device)
        lap("weights")
        loaded = Loaded(weights, hashed.result())
        lap("digest")
        return loaded


def _packed(source: TensorSource, config: Pi05Config, device: torch.device) -> Pi05Weights:
    padded = pads(config, device)
    if source.nbytes < _WORTH_A_BAR:
        return load_weights(source, config, device, padded=padded)
    with progress("loading weights", source.nbytes) as advance:
        return load_weights(source, config, device, advance, padded=padded)


def _source(resolved: Resolved) -> TensorSource:
    if resolved.checkpoint is not None:
        return FileSource(resolved.checkpoint.weights, resolved.config)
    return seeded_source(resolved.config)


def _tokenizer(resolved: Resolved) -> Tokenizer:
    seeded = SEEDED_PRESETS.get(resolved.config.preset)
    return Tokenizer(tokenizer_path(resolved, seeded.tokenizer if seeded else None))


def _normalisers(resolved: Resolved) -> Normalisers:
    config, checkpoint = resolved.config, resolved.checkpoint
    if checkpoint is None:
        return seeded_normalisers(config)
    state = len(config.state_names) if config.state_in_prompt else None
    if is_openpi(checkpoint.folder):
        return read_openpi_normalisers(checkpoint.folder, config.asset, state, max(config.action_columns) + 1)
    width = len(checkpoint.recorded_actions) or checkpoint.action_width or len(config.action_names)
    return read_normalisers(checkpoint.folder, state, width)
