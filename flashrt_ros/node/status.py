"""What the node runs and how it fares, as messages on `~/status` and `/diagnostics`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from diagnostic_msgs.msg import DiagnosticArray
from lifecycle_msgs.msg import State
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy

from ..contract import Rate, Role
from ..engine import Tier
from ..msg import EngineStatus, KernelStatus, StageStatus
from ..ops.report import KernelReport
from ..policies import Policy, PolicyRunner
from .capsule_desk import CapsuleDesk
from .decisions import Decider
from .diagnostics import diagnostics
from .epochs import Epochs
from .lifecycle import GuardedLifecycleNode
from .parameters import Settings
from .stream_status import quantiles, refusals, stream_status
from .streams import StreamSet
from .worker import Worker

_LATCHED = QoSProfile(depth=1, reliability=ReliabilityPolicy.RELIABLE, durability=DurabilityPolicy.TRANSIENT_LOCAL)


@dataclass(frozen=True)
class Subject:
    """Everything that a status tells of."""

    settings: Settings
    runner: PolicyRunner
    streams: StreamSet
    decider: Decider
    worker: Worker
    epochs: Epochs
    desk: CapsuleDesk
    warmup_replays: Counter[str]


class StatusPublisher:
    """Publishes the status of `subject`. Any thread may call `publish`."""

    def __init__(self, node: GuardedLifecycleNode, subject: Subject) -> None:
        self._node = node
        self._subject = subject
        self._status = node.create_publisher(EngineStatus, "~/status", _LATCHED)
        self._diagnostics = node.create_publisher(DiagnosticArray, "/diagnostics", 10)
        self._plan = _plan_fields(subject.runner)

    def publish(self) -> None:
        """Publish both messages now."""
        status = self.status()
        self._status.publish(status)
        active = self._node.state == "active"
        name = self._node.get_fully_qualified_name().lstrip("/")
        self._diagnostics.publish(diagnostics(name, status, self._subject.decider, active))

    def status(self) -> EngineStatus:
        """The status now."""
        node, subject = self._node, self._subject
        settings, decider, now = subject.settings, subject.decider, node.get_clock().now()
        return EngineStatus(
            **self._plan,
            **_decisions(subject),
            stamp=now.to_msg(),
            state=State(id=node.state_id, label=node.state),
            reason=decider.reason,
            stalled=decider.stall.stalled,
            stall_policy=settings.stall_policy,
            stages=_stages(subject.runner, subject.warmup_replays),
            **_capsules(subject.desk),
            session=decider.session,
            epoch=subject.epochs.current,
            instruction=decider.instruction,
            target_rate=settings.rate_hz,
            streams=[
                stream_status(node, stream, round(settings.max_age * 1e9), decider.instruction)
                for stream in subject.streams
            ],
        )

    def close(self) -> None:
        """Take both publishers down."""
        self._node.destroy_publisher(self._status)
        self._node.destroy_publisher(self._diagnostics)


def _plan_fields(runner: PolicyRunner) -> dict[str, object]:
    """What configure decided once."""
    policy, session = runner.policy, runner.session
    identity, device = policy.contract.identity, session.device
    on_gpu = device.type == "cuda"
    fast_stages = [stage for stage in policy.contract.stages if stage.rate >= Rate.OBSERVATION]
    return {
        "policy": policy.name,
        "checkpoint": policy.checkpoint,
        "fingerprint": session.fingerprint,
        "plan": "full" if len(fast_stages) == 1 else "split",
        "precision": identity.precision,
        "fidelity": policy.fidelity,
        "device": torch.cuda.get_device_name(device) if on_gpu else str(device),
        "ingest_path": _ingest_path(runner),
        "kernels": _kernels(policy),
    }


def _ingest_path(runner: PolicyRunner) -> str:
    """How a frame reaches the stages; of a policy without views, how its other windows do."""
    session, views = runner.session, runner.policy.views
    windows = [buffer.name for buffer in runner.policy.contract.buffers if buffer.role is Role.SWAP]
    return str(session.window_path(f"image.{views[0]}" if views else windows[0]))


def _kernels(policy: Policy) -> list[KernelStatus]:
    reports = policy.kernel_reports or (KernelReport("all"),)
    return [KernelStatus(op=r.op, kernel=r.kernel, fallback=r.fallback, reason=r.reason) for r in reports]


def _decisions(subject: Subject) -> dict[str, object]:
    tally = subject.decider.tally
    return {
        "chunks_published": tally.published,
        "chunks_dropped": sum(count for count, _ in tally.refusals.values()),
        "chunk_refusals": refusals(tally.refusals),
        "ticks_skipped": subject.worker.skipped,
        "ticks_without_observation": tally.without_observation,
        "stale_replays": tally.stale_replays,
        "rate": tally.current_rate(),
        "latency": quantiles(tally.latency),
        "session_time": quantiles(tally.session_time),
        "overhead": quantiles(tally.overhead),
        "bytes_copied_per_frame": tally.bytes_per_frame,
    }


def _capsules(desk: CapsuleDesk) -> dict[str, object]:
    store = desk.store
    return {
        "capsule_count": desk.count(),
        "capsule_device_bytes": store.used(Tier.DEVICE),
        "capsule_host_bytes": store.used(Tier.HOST),
        "capsule_disk_bytes": desk.folder.nbytes(),
        "capsule_budget_bytes": store.budget(Tier.DEVICE) + store.budget(Tier.HOST),
    }


def _stages(runner: PolicyRunner, warmup: Counter[str]) -> list[StageStatus]:
    contract, counts = runner.policy.contract, runner.session.counts
    every = [variant.name for variant in contract.variants]
    return [
        StageStatus(
            name=stage.name,
            rate=stage.rate.name.lower(),
            variants=list(stage.variants) or every,
            replays=counts[stage.name] - warmup[stage.name],
        )
        for stage in contract.order
    ]
