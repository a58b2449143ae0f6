"""Finding policies: one folder under `flashrt_ros.policies` is one policy."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import cast

from .base import Policy, SettingsError


def available_policies() -> tuple[str, ...]:
    """Names of the policies that this installation has."""
    package = importlib.import_module(__package__)
    return tuple(sorted(module.name for module in pkgutil.iter_modules(package.__path__) if module.ispkg))


def build_policy(name: str, settings: Mapping[str, object], device: str = "cpu") -> Policy:
    """Load policy `name` for `device`.

    Args:
        settings: the policy's own settings, as its YAML and documentation list them.

    Raises:
        SettingsError: no such policy, or a setting that it refuses.
        CheckpointError: its weights cannot be loaded.
    """
    if name not in available_policies():
        raise SettingsError(f"unknown policy '{name}'; this installation has: {', '.join(available_policies())}")
    module = importlib.import_module(f"{__package__}.{name}")
    return cast(Policy, module.build(settings, device))
