"""From settings to a policy that is ready to decide. Runs in the worker's thread, at configure only."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from ..engine import CapsuleFolder, CapsuleStore, resolve_device
from ..policies import Policy, PolicyRunner, build_policy
from ..policies.pixels import PixelOrder
from .chunk_checks import ChunkLimits
from .chunk_gate import ChunkGate
from .freshness import FreshnessLimits
from .joints import ActionMap
from .parameters import ParameterError, Settings

_WARM_UP_INSTRUCTION = "warm up"
_WARM_UP_SIDE = 224
_GREY = 128


def build_runner(settings: Settings) -> PolicyRunner:
    """Load the policy, capture its stages and warm them up; everything that can go wrong goes wrong here."""
    if settings.cpu_threads:
        torch.set_num_threads(settings.cpu_threads)
    policy = build_policy(settings.policy, settings.policy_settings, settings.device)
    check_views(settings, policy)
    runner = PolicyRunner.start(policy, settings.device, settings.seed, capsule_store(settings))
    try:
        warm_up(runner, settings.warmup)
    except BaseException:
        runner.close()
        raise
    # Warm-up drew noise; with the seed set again its number of decisions changes nothing.
    runner.session.seed(settings.seed)
    return runner


def capsule_store(settings: Settings) -> CapsuleStore:
    """Room for capsules, allocated now; DeviceError if the device is missing."""
    wanted = settings.capsules
    return CapsuleStore(resolve_device(settings.device), wanted.device_mib << 20, wanted.host_mib << 20)


def capsule_folder(settings: Settings) -> CapsuleFolder:
    """Where durable capsules are; made when the first one is saved."""
    if settings.capsules.folder:
        return CapsuleFolder(Path(settings.capsules.folder).expanduser())
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return CapsuleFolder(Path(data) / "flashrt_ros" / "capsules")


def warm_up(runner: PolicyRunner, decisions: int) -> None:
    """Decide on grey images and a state of zeros, so that the first real decision is no slower than the next."""
    policy = runner.policy
    side = min(_WARM_UP_SIDE, math.isqrt(policy.max_pixels))
    grey = np.full((side, side, 3), _GREY, np.uint8)
    for _ in range(decisions):
        for view in policy.views:
            runner.set_image(view, grey, PixelOrder.RGB)
        if policy.state_names:
            runner.set_state(np.zeros(len(policy.state_names), np.float32))
        runner.set_instruction(_WARM_UP_INSTRUCTION)
        runner.decide()


def check_views(settings: Settings, policy: Policy) -> None:
    """ParameterError if a view is configured that the policy does not see, or two views share a topic."""
    unknown = [view for view in settings.views if view not in policy.views]
    if unknown:
        raise ParameterError(
            f"parameter 'views.{unknown[0]}' is for a view that policy '{policy.name}' does not see; it sees: "
            f"{', '.join(policy.views)}"
        )
    topics = [settings.view(view).topic for view in policy.views]
    shared = next((topic for topic in topics if topics.count(topic) > 1), None)
    if shared is not None:
        both = ", ".join(view for view in policy.views if settings.view(view).topic == shared)
        raise ParameterError(f"topic '{shared}' is that of several views ({both}); give each view its own")


def chunk_gate(settings: Settings, policy: Policy) -> ChunkGate:
    """What every chunk must pass; JointError or ParameterError for joints that the policy does not drive."""
    actions = ActionMap(policy.action_names, settings.action_joints or policy.action_names)
    joints = actions.joint_names
    unknown = [joint for joint in settings.limits if joint not in joints]
    if unknown:
        raise ParameterError(
            f"parameter 'limits.{unknown[0]}' is for a joint that chunks do not command; they command: "
            f"{', '.join(joints)}"
        )
    try:
        limits = ChunkLimits(
            joints,
            {joint: (row.lower, row.upper) for joint, row in settings.limits.items() if _bounded(row.lower, row.upper)},
            _by_joint(joints, settings.max_first_step, {j: r.max_first_step for j, r in settings.limits.items()}),
            _by_joint(joints, settings.max_step, {j: r.max_step for j, r in settings.limits.items()}),
        )
    except ValueError as error:
        raise ParameterError(f"parameters 'limits': {error}") from error
    return ChunkGate(policy.chunk, actions, limits)


def measured_joints(settings: Settings, gate: ChunkGate) -> tuple[str, ...]:
    """Joints whose measured positions are needed: for the first step, and to hold still."""
    needed = gate.limits.needs_measured or settings.stall_policy == "hold"
    return gate.limits.joint_names if needed else ()


def freshness_limits(settings: Settings) -> FreshnessLimits:
    """The limits of age and skew."""
    return FreshnessLimits.from_seconds(settings.max_age, settings.future_tolerance, settings.max_skew)


def _bounded(lower: float, upper: float) -> bool:
    return math.isfinite(lower) or math.isfinite(upper)


def _by_joint(joints: tuple[str, ...], common: float, special: Mapping[str, float | None]) -> dict[str, float]:
    given = {joint: limit for joint, limit in special.items() if limit is not None}
    return {joint: given.get(joint, common) for joint in joints}
