"""π0.5 as the runner sees it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from ...contract import Contract, Identity
from ...engine import Session, StageBody
from ...ops import OpTable, reference_ops
from ...ops.report import KernelReport
from ...precision.fidelity import NOT_GATED
from ...precision.ops import tier_ops
from .config import Pi05Config
from .plan import build_contract
from .processor import Pi05Processor
from .stages import Pi05Stages
from .tiers import choose_tier, gate, pack_weights, require_gpu
from .weights import Pi05Weights


@dataclass(frozen=True)
class Pi05Policy:
    """One π0.5 model, ready to run. See `Policy` for the meaning of each part.

    `parts` are the pieces of a decision, in their order: "vision", "prefix" and "expert". `fidelity` is what the tier's
    gate found.
    """

    config: Pi05Config
    checkpoint: str
    contract: Contract
    bodies: Mapping[str, StageBody]
    processor: Pi05Processor
    parts: Mapping[str, StageBody]
    weights: Pi05Weights
    kernel_reports: tuple[KernelReport, ...] = ()
    fidelity: str = NOT_GATED
    name: str = "pi05"

    @property
    def views(self) -> tuple[str, ...]:
        """Camera views, in the order of the `image_format` rows."""
        return self.config.views

    @property
    def max_pixels(self) -> int:
        """Largest height × width of a camera frame."""
        return self.config.max_pixels

    @property
    def state_names(self) -> tuple[str, ...]:
        """Joints of the state, in the model's order."""
        return self.config.state_names

    @property
    def action_names(self) -> tuple[str, ...]:
        """Joints of an action."""
        return self.config.action_names

    @property
    def chunk(self) -> int:
        """Actions in one chunk."""
        return self.config.chunk

    @property
    def action_dt(self) -> float:
        """Seconds between two actions."""
        return self.config.action_dt

    def prepare(self, session: Session) -> None:
        """Nothing: the checkpoint stage writes every STATIC buffer that no prompt does."""

    def write_prompt(self, session: Session, instruction: str, state: np.ndarray | None) -> str:
        """See `Policy.write_prompt`; what counts is what the session holds, as a capsule may have changed it."""
        text = self.processor.text(instruction, state)
        prompt = self.processor.prompt(text)
        if not self.processor.is_content(prompt, session.content("tokens")) or "tokens" in session.unfilled:
            if "tokens" in session.unfilled or not np.array_equal(session.read("tokens"), prompt.tokens):
                session.fill("tokens", prompt.tokens)
            self.processor.note_content(prompt, session.content("tokens"))
        session.set_extent("prompt_rows", prompt.count)
        session.set_extent("prefix_rows", self.config.image_rows + prompt.count)
        session.select(prompt.variant)
        return text

    def actions(self, session: Session, state: np.ndarray | None) -> np.ndarray:
        """See `Policy.actions`."""
        return self.processor.actions(session.read("actions"), state)


class Loaded:
    """Weights that are handed over once: whoever takes them can free what they replace.

    Attributes:
        digest: SHA-256 of the checkpoint's tensors.
    """

    def __init__(self, weights: Pi05Weights, digest: str) -> None:
        self.digest = digest
        self._weights = [weights]

    def take(self) -> Pi05Weights:
        """The weights, which are not kept here."""
        return self._weights.pop()


def assemble(
    config: Pi05Config,
    loaded: Loaded,
    processor: Pi05Processor,
    *,
    checkpoint: str,
    device: torch.device,
    ops: OpTable | None = None,
) -> Pi05Policy:
    """Put the parts of a policy together, in the tier that `config` asks for.

    Args:
        loaded: weights in `config.dtype`, which are taken.
        checkpoint: path of the weights, or "preset:<name>".
        ops: implementations to call; the PyTorch references by default.

    Raises:
        SettingsError: the tier cannot start: no calibration of this contract, no passed gate, or not on this GPU.
    """
    table = ops or reference_ops()
    identity = replace(
        wide_identity(config, loaded.digest, processor),
        kernels=",".join(table.replaced()) or "reference",
        architecture=_architecture(device),
    )
    tier = choose_tier(config, identity)
    weights = loaded.take()
    if tier is not None:
        identity = replace(identity, precision=tier.identity)
        weights, table = pack_weights(weights, tier, padded=pads(config, device)), tier_ops(table)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the 16-bit weights are no longer there
    contract = replace(build_contract(config, identity), formats=tier.formats if tier else ())
    stages: Pi05Stages = Pi05Stages(config, weights, table)
    reports: tuple[KernelReport, ...] = ()
    if device.type != "cpu" and config.fused:
        require_gpu(tier, device)
        stages, reports, contract = _fused(config, weights, table, contract, device)
    fidelity = gate(tier, contract.fingerprint, unverified=config.unverified)
    return Pi05Policy(
        config, checkpoint, contract, stages.bodies(), processor, stages.parts(), weights, reports, fidelity
    )


def pads(config: Pi05Config, device: torch.device) -> bool:
    """Whether weights need room for padding: where fused stages multiply them."""
    if not config.fused or device.type != "cuda":
        return False
    from .cuda_plan import unsuited

    return not unsuited(config, torch.cuda.get_device_capability(device))


def with_overlap(policy: Pi05Policy, overlap: bool, device: torch.device) -> Pi05Policy:
    """The same policy of the same weights, which are not copied, with launch overlap on or off: its bits are equal.

    Args:
        policy: built for `device` with PyTorch's ops as references.
    """
    config = replace(policy.config, overlap=overlap)
    if device.type == "cpu" or not config.fused:
        return replace(policy, config=config)
    from .cuda_plan import choose_stages

    table = tier_ops(reference_ops()) if config.calibration else reference_ops()
    stages, reports = choose_stages(config, policy.weights, table, policy.contract, device, overlap=overlap)
    return replace(policy, config=config, bodies=stages.bodies(), parts=stages.parts(), kernel_reports=reports)


def wide_identity(config: Pi05Config, digest: str, processor: Pi05Processor) -> Identity:
    """What a policy is in its wide precision, with kernels and architecture left open.

    Args:
        digest: SHA-256 of the checkpoint's tensors.
    """
    return Identity(
        policy="pi05",
        weights=_model_digest(digest, config),
        precision=config.dtype,
        views=config.views,
        chunk=config.chunk,
        horizon=config.chunk,
        embodiment=_embodiment(config),
        normalisation=processor.digest(),
    )


def _fused(
    config: Pi05Config, weights: Pi05Weights, table: OpTable, contract: Contract, device: torch.device
) -> tuple[Pi05Stages, tuple[KernelReport, ...], Contract]:
    """Stages for a GPU, why each is what it is, and the contract with the kernels in its identity."""
    from .cuda_plan import choose_stages, kernel_identity

    stages, reports = choose_stages(config, weights, table, contract, device, overlap=config.overlap)
    identity = replace(contract.identity, kernels=kernel_identity(reports, contract.identity.kernels))
    return stages, reports, replace(contract, identity=identity)


# What weights mean beyond their shapes, and what no buffer's shape shows.
_CONSTANTS = (
    "patch_size", "vision_heads", "query_heads", "key_heads", "head_dim", "eps", "rope_theta", "min_period",
    "max_period",
)  # fmt: skip


def _model_digest(weights_digest: str, config: Pi05Config) -> str:
    constants = {name: getattr(config, name) for name in _CONSTANTS}
    return hashlib.sha256(f"{weights_digest} {constants}".encode()).hexdigest()


def _embodiment(config: Pi05Config) -> str:
    """State and action names, and what the model means by them, as one readable text."""
    state = ",".join(config.state_names) + ("" if config.state_in_prompt else " (not in the prompt)")
    columns = zip(config.action_names, config.action_columns, strict=True)
    kept = set(config.absolute_actions) if config.relative_actions else set(config.action_names)
    actions = ",".join(f"{name}@{column}{'' if name in kept else '+'}" for name, column in columns)
    return f"{state} -> {actions}"


def _architecture(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
