"""Policies: one folder each, with configuration, weights, stages and conversions of one model."""

from .base import CheckpointError, Policy, PolicyError, PromptError, SettingsError
from .registry import available_policies, build_policy
from .runner import Decision, PolicyRunner

__all__ = [
    "CheckpointError",
    "Decision",
    "Policy",
    "PolicyError",
    "PolicyRunner",
    "PromptError",
    "SettingsError",
    "available_policies",
    "build_policy",
]
