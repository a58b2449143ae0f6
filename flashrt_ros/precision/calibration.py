"""A calibration: what a tier must know of activations, in one file that belongs to one contract.

The file is safetensors: multipliers as tensors, everything else as JSON in the header, a SHA-256 over both.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..contract import WIDE, Contract, ContractError, SiteFormat
from .errors import CalibrationError

SCHEMA = 1
_ANY = "any"


@dataclass(frozen=True)
class SiteReport:
    """What calibration saw at one site and what the chosen scale does to it.

    Attributes:
        rows: live rows seen.
        largest: largest magnitude, of the input times its multiplier.
        outlier: largest / 99.9th percentile.
        saturated, lost: shares of the values that the scale clips, and of those above zero that it rounds to zero.
        strength: of the activation-aware scaling that was chosen.
        error: of the quantised product on sampled rows, relative, 2-norm.
    """

    rows: int
    largest: float
    outlier: float
    saturated: float
    lost: float
    strength: float
    error: float


@dataclass(frozen=True)
class SiteScale:
    """`input_scale` divides the input (None: it stays 16-bit); `multiplier` float32[inputs] is applied before that."""

    input_scale: float | None
    multiplier: Tensor | None = None


@dataclass(frozen=True)
class Calibration:
    """Scales and multipliers of every site of a tier.

    Attributes:
        contract: the plan that they belong to, as `calibration_key` makes it.
        scales, reports: by site; a table that is only looked up has a scale of nothing, and no report.
        protocol: how they were made: percentile, headroom, observations, device, versions.
    """

    contract: Contract
    scales: Mapping[str, SiteScale]
    reports: Mapping[str, SiteReport] = field(default_factory=dict)
    protocol: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over everything here that changes an action."""
        sha = hashlib.sha256(self.contract.fingerprint.encode())
        for site, scale in sorted(self.scales.items()):
            sha.update(f"{site} {scale.input_scale!r}".encode())
            sha.update(b"" if scale.multiplier is None else scale.multiplier.cpu().numpy().tobytes())
        return sha.hexdigest()


def calibration_key(contract: Contract, tier: str, formats: tuple[SiteFormat, ...]) -> Contract:
    """The contract that a calibration belongs to: all of `contract`, with the tier's table.

    Device and kernels are left open, because scales are taken from the references: one file serves the machine that
    calibrates and the robot. Whether the robot's kernels are good enough with them is for the fidelity gate.
    """
    identity = replace(contract.identity, precision=tier, kernels=_ANY, architecture=_ANY)
    return replace(contract, identity=identity, formats=formats)


def save_calibration(path: Path, calibration: Calibration) -> None:
    """Write `path` as a whole or not at all; CalibrationError if it cannot be written."""
    tensors = {s: v.multiplier.contiguous().cpu() for s, v in calibration.scales.items() if v.multiplier is not None}
    manifest = {
        "schema": SCHEMA,
        "contract": calibration.contract.to_json(),
        "scales": {site: scale.input_scale for site, scale in calibration.scales.items()},
        "reports": {site: asdict(report) for site, report in calibration.reports.items()},
        "protocol": dict(calibration.protocol),
    }
    text = json.dumps(manifest, sort_keys=True)
    data = save(tensors, {"manifest": text, "sha256": _sha256(text, tensors)})
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError as error:
        raise CalibrationError(f"cannot write calibration '{path}': {error.strerror}") from None


def load_calibration(path: Path, key: Contract | None = None) -> Calibration:
    """Read and check a calibration.

    Args:
        key: the contract that it must belong to; None reads whatever it belongs to.

    Raises:
        CalibrationError: no such file, damaged, altered, of another contract (with the fields that differ), or with a
            site that is missing, unknown, or has a scale that no measurement gives.
    """
    manifest, tensors = _read(path)
    try:
        contract = Contract.from_json(manifest["contract"])
        scales = {s: SiteScale(value, tensors.pop(s, None)) for s, value in manifest["scales"].items()}
        reports = {site: SiteReport(**report) for site, report in manifest["reports"].items()}
        calibration = Calibration(contract, scales, reports, dict(manifest["protocol"]))
    except (KeyError, TypeError, AttributeError, ContractError) as error:
        raise CalibrationError(f"calibration '{path}' is malformed ({error}); calibrate again") from None
    if key is not None and key.fingerprint != contract.fingerprint:
        fields = ", ".join(contract.differences(key))
        raise CalibrationError(
            f"calibration '{path}' belongs to another contract; what differs: {fields}. "
            "Run `flashrt calibrate` with this checkpoint, these settings and this tier"
        )
    _check_sites(path, calibration, tensors)
    return calibration


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        opened: Any = safe_open(path, framework="pt")  # has no type information
        with opened as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no mapping
    except (OSError, SafetensorError) as error:
        raise CalibrationError(f"cannot read calibration '{path}': {error}; make it with `flashrt calibrate`") from None
    text = metadata.get("manifest", "")
    if not text:
        raise CalibrationError(f"'{path}' is no calibration: it has no manifest; make one with `flashrt calibrate`")
    if metadata.get("sha256") != _sha256(text, tensors):
        raise CalibrationError(f"calibration '{path}' was altered: its SHA-256 does not fit; calibrate again")
    manifest: dict[str, Any] = json.loads(text)
    if manifest.get("schema") != SCHEMA:
        raise CalibrationError(
            f"calibration '{path}' has schema {manifest.get('schema')!r}, this version reads {SCHEMA}; calibrate again"
        )
    return manifest, tensors


def _sha256(text: str, tensors: Mapping[str, Tensor]) -> str:
    sha = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        sha.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        sha.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def _check_sites(path: Path, calibration: Calibration, surplus: Mapping[str, Tensor]) -> None:
    table = {item.name: item for item in calibration.contract.formats}
    missing = [site for site in table if site not in calibration.scales]
    unknown = [site for site in (*calibration.scales, *surplus) if site not in table]
    if missing or unknown:
        what = f"has no site '{missing[0]}'" if missing else f"has a site '{unknown[0]}' that the tier does not"
        raise CalibrationError(f"calibration '{path}' {what}; calibrate again")
    for site, scale in calibration.scales.items():
        reason = _wrong(scale, table[site])
        if reason:
            raise CalibrationError(f"calibration '{path}', site '{site}': {reason}; calibrate again")


def _wrong(scale: SiteScale, table: SiteFormat) -> str:
    """What no measurement gives, or nothing."""
    value, multiplier = scale.input_scale, scale.multiplier
    if (value is None) != (table.activation == WIDE):
        return f"input scale {value}, but its activations are {table.activation}"
    if value is not None and not (isinstance(value, float) and math.isfinite(value) and value > 0):
        return f"input scale {value} is not a positive number"
    if multiplier is None:
        return ""
    if multiplier.dtype != torch.float32 or multiplier.ndim != 1:
        return f"multiplier is {multiplier.dtype}{list(multiplier.shape)}, expected float32[inputs]"
    if not bool((multiplier.isfinite() & (multiplier > 0)).all()):
        return "multiplier holds a value that is not a positive number"
    return ""
