"""π0.5: a vision-language prefix encoder and a flow-matching action expert."""

from __future__ import annotations

from collections.abc import Mapping

from ...engine import resolve_device
from ...ops import OpTable
from .checkpoint import Normalisers
from .config import Pi05Config
from .lerobot import read_normalisers
from .openpi import is_openpi, read_openpi_normalisers
from .policy import Pi05Policy, assemble
from .presets import SEEDED_PRESETS
from .processor import Pi05Processor
from .seeded import seeded_normalisers, seeded_source
from .settings import Resolved, resolve, tokenizer_path
from .source import FileSource, TensorSource, digest
from .tokenizer import Tokenizer
from .weights import load_weights

__all__ = ["Pi05Config", "Pi05Policy", "build"]


def build(settings: Mapping[str, object], device: str = "cpu", ops: OpTable | None = None) -> Pi05Policy:
    """Load a π0.5 policy.

    Args:
        settings: any fields of `Pi05Config`; `preset` alone is enough for the tiny model.
        device: "cpu", "cuda" or "cuda:N".
        ops: implementations of the ops; the PyTorch references by default.

    Raises:
        SettingsError: a setting is unknown, wrong, or contradicts the checkpoint.
        CheckpointError: weights or statistics are missing, corrupt or of another configuration.
        DeviceError: this machine lacks the device.
    """
    target = resolve_device(device)
    resolved = resolve(settings)
    config = resolved.config
    processor = Pi05Processor(config, _tokenizer(resolved), _normalisers(resolved))
    source = _source(resolved)
    return assemble(
        config,
        load_weights(source, config, target),
        processor,
        weights_digest=digest(source),
        checkpoint=str(resolved.checkpoint.folder) if resolved.checkpoint else f"preset:{config.preset}",
        device=target,
        ops=ops,
    )


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
