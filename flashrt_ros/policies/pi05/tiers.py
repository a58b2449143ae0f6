"""π0.5 in a precision tier: weights packed as the tier's table says, calibration folded in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ...contract import WIDE, Contract, Identity, SiteFormat
from ...precision.calibration import Calibration, calibration_key, load_calibration
from ...precision.capability import require_capability
from ...precision.errors import CalibrationError, PrecisionError, TierError
from ...precision.fidelity import NOT_GATED, recorded, require
from ...precision.packed import PackedWeight, stored_bytes
from ...precision.tier import Tier, load_tier
from ..base import SettingsError
from .config import Pi05Config
from .plan import build_contract
from .sites import change_sites, operand_sites, operands_of, site_matrices, site_names
from .weights import Dense, Pi05Weights, VisionLayer

_CODES, _CODED_WEIGHTS = "e4m3", ("e4m3", "e4m3_tensor")
_SCALE, _SHIFT = 0, 1  # rows of an adaptive norm's dense layer, in thirds
_PREFIX_QKV = "prefix.qkv."
_PADDED = ("vision.up.", "vision.down.")  # what `load_weights` gives room for padding, of the sites


@dataclass(frozen=True)
class ChosenTier:
    """A tier as a policy runs it: its table, the sites that are not 16-bit, and the calibration, if it needs one."""

    tier: Tier
    formats: tuple[SiteFormat, ...]
    path: Path
    calibration: Calibration | None

    @property
    def identity(self) -> str:
        """What the contract's identity says of precision."""
        return self.tier.name if self.calibration is None else f"{self.tier.name}, {self.calibration.digest[:16]}"


def narrow_formats(tier: Tier, config: Pi05Config) -> tuple[SiteFormat, ...]:
    """Formats of the sites that `tier` does not leave 16-bit; TierError if attention cannot have those of its own."""
    table = {item.name: item for item in tier.formats(site_names(config))}
    for product, operands in operand_sites(config).items():
        narrow = {table[site].activation for site in operands} - {WIDE}
        codes = all(table[site].activation == _CODES for site in operands)
        if narrow and not (codes and table[product].activation == _CODES and table[product].weight in _CODED_WEIGHTS):
            raise TierError(
                f"tier '{tier.name}', site '{operands[0]}': attention multiplies queries, keys and values that are all "
                f"{_CODES} and made by an {_CODES} x {_CODES} product, or 16-bit ones; put a rule in front of the "
                "others that gives `sites: prefix.attention.*` 16-bit activations"
            )
        table |= {site: SiteFormat(site, WIDE, table[site].activation) for site in operands}  # they have no weight
    return tuple(item for item in table.values() if not item.wide)


def formats_of(config: Pi05Config) -> tuple[SiteFormat, ...]:
    """Formats of the sites that the tier of `config` does not leave 16-bit; SettingsError if there is no such tier."""
    try:
        return narrow_formats(load_tier(config.precision), config)
    except PrecisionError as error:
        raise SettingsError(str(error)) from None


def tier_key(config: Pi05Config, tier: Tier, identity: Identity) -> Contract:
    """The contract that a calibration of `tier` belongs to, for a policy of this configuration and identity.

    Both plans give equal bits, so that one calibration serves them.
    """
    contract = build_contract(replace(config, plan="split"), identity)
    return calibration_key(contract, tier.name, narrow_formats(tier, config))


def choose_tier(config: Pi05Config, identity: Identity) -> ChosenTier | None:
    """The tier that `config` asks for, with its calibration read and checked; None for 16-bit.

    Raises:
        SettingsError: the tier or its calibration is missing, malformed, or of another policy.
    """
    try:
        tier = load_tier(config.precision)
        if tier.wide:
            if config.calibration:
                raise SettingsError("setting 'calibration' is set, but a 16-bit tier has none; remove it")
            return None
        key = tier_key(config, tier, identity)
        if not config.calibration:
            raise SettingsError(
                f"setting 'calibration' is empty, and precision '{config.precision}' does not start without one; "
                "make it with `flashrt calibrate` and set its path"
            )
        path = Path(config.calibration).expanduser()
        return ChosenTier(tier, key.formats, path, load_calibration(path, key))
    except PrecisionError as error:
        raise SettingsError(str(error)) from None


def require_gpu(chosen: ChosenTier | None, device: torch.device) -> None:
    """SettingsError, with site and reason, if the GPU cannot multiply in a format of the tier."""
    if chosen is not None:
        try:
            require_capability(chosen.formats, torch.cuda.get_device_capability(device), chosen.tier.name)
        except PrecisionError as error:
            raise SettingsError(str(error)) from None


def gate(chosen: ChosenTier | None, fingerprint: str, *, unverified: bool) -> str:
    """What the fidelity gate found for this contract; SettingsError if the tier may not start.

    Args:
        unverified: start whatever was found, and say so.
    """
    if chosen is None:
        return NOT_GATED
    try:
        if unverified:
            result = recorded(chosen.path, fingerprint)
            return f"not enforced; {result or 'never measured'}"
        return str(require(chosen.path, fingerprint, chosen.tier.name, chosen.tier.fidelity))
    except PrecisionError as error:
        raise SettingsError(str(error)) from None


def pack_weights(weights: Pi05Weights, chosen: ChosenTier, *, padded: bool = False) -> Pi05Weights:
    """`weights` with every narrow site packed, and multipliers folded into the norms in front where they have weights.

    Vision folds into the weight and bias of its LayerNorm, the expert into scale and shift of its adaptive norm; the
    norms of the prefix have no weight of their own, so that their sites keep the multiplier.

    Args:
        padded: as for `load_weights`.

    Raises:
        SettingsError: the calibration does not fit the shape of a site, or a weight has no finite scale.
    """
    table = {item.name: item for item in chosen.formats}
    scales = chosen.calibration.scales if chosen.calibration is not None else {}
    multipliers = {site: s.multiplier for site, s in scales.items() if s.multiplier is not None}

    def pack(site: str, matrix: Tensor) -> Tensor:
        if site not in table:
            return matrix
        value, multiplier = scales[site].input_scale, _fitting(site, multipliers.get(site), matrix)
        scale = None if value is None else torch.tensor([value], device=matrix.device)
        kept = multiplier if site.startswith("prefix.") else None
        scaled = matrix if multiplier is None else matrix.float() / multiplier
        return PackedWeight(
            scaled, table[site], scale, kept, padded=padded and site.startswith(_PADDED),
            output_scales=_operand_scales(site, chosen, matrix.device),
        )  # fmt: skip

    try:
        return _folded(change_sites(weights, pack), multipliers)
    except PrecisionError as error:
        raise SettingsError(str(error)) from None


def _operand_scales(site: str, chosen: ChosenTier, device: torch.device) -> Tensor | None:
    """float32[3]: scales of the codes that queries, keys and values become, which the product `site` makes; or None."""
    if not site.startswith(_PREFIX_QKV) or chosen.calibration is None:
        return None
    known = (chosen.calibration.scales.get(name) for name in operands_of(int(site.removeprefix(_PREFIX_QKV))))
    values = [scale.input_scale for scale in known if scale is not None]
    return torch.tensor(values, device=device) if values else None


def _fitting(site: str, multiplier: Tensor | None, matrix: Tensor) -> Tensor | None:
    if multiplier is None:
        return None
    if len(multiplier) != matrix.shape[1]:
        raise CalibrationError(
            f"site '{site}' takes {matrix.shape[1]} inputs, its multiplier has {len(multiplier)}; calibrate again"
        )
    return multiplier.to(matrix.device)


def _folded(weights: Pi05Weights, multipliers: Mapping[str, Tensor]) -> Pi05Weights:
    vision = weights.vision
    layers = tuple(_folded_vision(layer, index, multipliers) for index, layer in enumerate(vision.layers))
    modulations = list(weights.time.modulations)
    for index in range(len(weights.expert.layers)):
        for place, part in enumerate(("qkv", "gate_up")):
            multiplier = multipliers.get(f"expert.{part}.{index}")
            if multiplier is not None:
                modulations[2 * index + place] = _folded_modulation(modulations[2 * index + place], multiplier)
    return replace(
        weights,
        vision=replace(vision, layers=layers),
        time=replace(weights.time, modulations=tuple(modulations)),
    )


def _folded_vision(layer: VisionLayer, index: int, multipliers: Mapping[str, Tensor]) -> VisionLayer:
    def fold(norm: Dense, site: str) -> Dense:
        multiplier = multipliers.get(f"vision.{site}.{index}")
        if multiplier is None:
            return norm
        factor = multiplier.to(norm.weight)  # a power of two, exact in every type
        return Dense(norm.weight * factor, norm.bias * factor)

    return replace(layer, norm1=fold(layer.norm1, "qkv"), norm2=fold(layer.norm2, "up"))


def _folded_modulation(dense: Dense, multiplier: Tensor) -> Dense:
    """A dense layer whose norm gives (1 + scale) and shift times `multiplier`; the bias becomes float32, which holds
    (1 + scale) * multiplier - 1."""
    weight, bias = dense.weight.clone(), dense.bias.float().clone()
    thirds, biases = weight.view(3, len(multiplier), -1), bias.view(3, -1)
    factor = multiplier.to(weight.device)
    for row in (_SCALE, _SHIFT):
        thirds[row] *= factor[:, None].to(weight.dtype)
        biases[row] *= factor
    biases[_SCALE] += factor - 1
    return Dense(weight, bias)


@dataclass(frozen=True)
class WeightBytes:
    """Bytes that weights take on the device, and would take with every value in 16 bits."""

    stored: int
    wide: int

    @property
    def ratio(self) -> float:
        """stored / wide."""
        return self.stored / self.wide


def weight_bytes(weights: Pi05Weights, formats: tuple[SiteFormat, ...] = ()) -> WeightBytes:
    """Count `weights`, which may be on the meta device.

    Args:
        formats: sites of unpacked weights to count as if they were packed.
    """
    table = {id(matrix): item for item, matrix in _matched(weights, formats)}
    stored = wide = 0
    for tensor in _tensors(weights):
        wide += 2 * tensor.shape.numel()
        if isinstance(tensor, PackedWeight):
            stored += tensor.stored_bytes
        elif id(tensor) in table:
            stored += stored_bytes(table[id(tensor)], *tensor.shape)
        else:
            stored += tensor.nbytes
    return WeightBytes(stored, wide)


def _matched(weights: Pi05Weights, formats: tuple[SiteFormat, ...]) -> Iterator[tuple[SiteFormat, Tensor]]:
    matrices = site_matrices(weights)
    return ((item, matrices[item.name]) for item in formats if item.weight != WIDE)


def _tensors(value: object) -> Iterator[Tensor]:
    """Every tensor in a tree of dataclasses and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value):
        for item in fields(value):
            yield from _tensors(getattr(value, item.name))
