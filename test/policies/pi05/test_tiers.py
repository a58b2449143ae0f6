"""π0.5 in a tier: sites, packing, folding, bytes, and everything without which a tier does not start."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

from flashrt_ros.contract import Contract
from flashrt_ros.engine import Session
from flashrt_ros.policies import SettingsError
from flashrt_ros.policies.pi05 import Pi05Policy, build, cuda_plan, tiers
from flashrt_ros.policies.pi05 import policy as policy_module
from flashrt_ros.policies.pi05.config import Pi05Config
from flashrt_ros.policies.pi05.layout import expected_shapes
from flashrt_ros.policies.pi05.memory import needed_bytes
from flashrt_ros.policies.pi05.sites import change_sites, foldable_sites, operand_sites, site_matrices, site_names
from flashrt_ros.policies.pi05.tiers import narrow_formats, tier_key, weight_bytes
from flashrt_ros.policies.pi05.weights import Pi05Weights, load_weights
from flashrt_ros.precision.calibration import Calibration, SiteScale, save_calibration
from flashrt_ros.precision.fidelity import Result, record
from flashrt_ros.precision.packed import PackedWeight
from flashrt_ros.precision.tier import load_tier, presets
from test.policies.pi05.tiny import SMALL, small_policy, started

WIDE = small_policy()
SITES = site_names(WIDE.config)
OPERANDS = {site for sites in operand_sites(WIDE.config).values() for site in sites}  # which have no matrix


def made_up(tier: str, scale: float = 0.05, multiplier: bool = False) -> Calibration:
    """A calibration of equal scales, with multipliers of 1/2, 1 and 2 where a norm can take them."""
    loaded = load_tier(tier)
    key = tier_key(WIDE.config, loaded, WIDE.contract.identity)
    matrices, foldable = site_matrices(WIDE.weights), foldable_sites(WIDE.config)

    def entry(site: str, activation: str) -> SiteScale:
        if site not in foldable or not multiplier:
            return SiteScale(None if activation == "16-bit" else scale)
        factors = torch.exp2(torch.arange(matrices[site].shape[1]) % 3 - 1.0)
        return SiteScale(None if activation == "16-bit" else scale, factors)

    return Calibration(key, {item.name: entry(item.name, item.activation) for item in key.formats})


def kept(folder: Path, tier: str, **options: Any) -> dict[str, Any]:
    """Settings of a tier with a made-up calibration."""
    path = folder / "c.safetensors"
    save_calibration(path, made_up(tier, **options))
    return {"precision": tier, "calibration": str(path), "unverified": True}


def wide_tier(folder: Path, sites: str = "expert.*", weight: str = "e4m3", activation: str = "16-bit") -> str:
    """A tier of a user's own: `sites` in a format, the rest in 16 bits."""
    rules = [(sites, weight, activation), ("*", "16-bit", "16-bit")]
    data = {
        "tier": "mine",
        "fidelity": {"cosine_global": 0.99, "cosine_worst": 0.9},
        "rules": [
            dict(zip(("sites", "weight", "activation", "why"), (*rule, "a test"), strict=True)) for rule in rules
        ],
    }
    (folder / "mine.yaml").write_text(yaml.safe_dump(data))
    return str(folder / "mine.yaml")


# -- sites -------------------------------------------------------------------------------------------------------------


def test_changing_nothing_changes_nothing() -> None:
    assert change_sites(WIDE.weights, lambda site, matrix: matrix) == WIDE.weights


@pytest.mark.parametrize("name", presets())
def test_every_preset_covers_every_site(name: str) -> None:
    assert tuple(item.name for item in load_tier(name).formats(SITES)) == SITES


# -- bytes -------------------------------------------------------------------------------------------------------------


def true_config() -> Pi05Config:
    return Pi05Config(views=("a", "b"), state_names=("a",), action_names=("a",), chunk=10)


class MetaSource:
    """A checkpoint of the true size that takes no memory."""

    def __init__(self, config: Pi05Config) -> None:
        self._shapes = expected_shapes(config)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._shapes)

    @property
    def nbytes(self) -> int:
        return 0

    def tensor(self, name: str) -> Tensor:
        return torch.empty(self._shapes[name], device="meta", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def true_weights() -> Pi05Weights:
    return load_weights(MetaSource(true_config()), true_config(), torch.device("meta"))


@pytest.mark.parametrize(
    ("name", "most"), [("16-bit", 1.001), ("8-bit", 0.55), ("4-bit", 0.35), ("4-bit-blackwell", 0.35)]
)
def test_at_true_size_a_tier_takes_no_more_than_it_promises(true_weights: Pi05Weights, name: str, most: float) -> None:
    counted = weight_bytes(true_weights, narrow_formats(load_tier(name), true_config()))
    assert counted.wide > 6e9
    assert 0.8 * most < counted.ratio <= most


@pytest.mark.parametrize("name", presets()[1:])
def test_what_is_counted_is_what_is_stored(tmp_path: Path, name: str) -> None:
    packed = small_policy(**kept(tmp_path, name))
    counted = weight_bytes(WIDE.weights, narrow_formats(load_tier(name), WIDE.config))
    assert weight_bytes(packed.weights) == counted
    assert counted.stored == sum(
        tensor.stored_bytes if isinstance(tensor, PackedWeight) else tensor.nbytes for tensor in tensors(packed.weights)
    )


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from tensors(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors(getattr(value, field.name))


# -- a tier that runs --------------------------------------------------------------------------------------------------


def test_every_narrow_site_is_packed_as_the_table_says(tmp_path: Path) -> None:
    policy = small_policy(**kept(tmp_path, "4-bit"))
    stored = site_matrices(policy.weights)
    for item in policy.contract.formats:
        matrix = stored[item.name]
        assert isinstance(matrix, PackedWeight)
        assert (matrix.format, matrix.activation, matrix.site) == (item.weight, item.activation, item.name)


def test_a_tier_decides_near_the_wide_policy_and_always_alike(tmp_path: Path) -> None:
    wide, narrow = started().decide().actions, started(**kept(tmp_path, "8-bit")).decide().actions
    assert np.isfinite(narrow).all()
    assert 0 < float(np.abs(narrow - wide).max()) < 0.2
    assert np.array_equal(narrow, started(**kept(tmp_path, "8-bit")).decide().actions)


def test_full_and_split_plans_share_a_calibration_and_give_equal_bits(tmp_path: Path) -> None:
    settings = kept(tmp_path, "4-bit")
    assert np.array_equal(
        started(plan="split", **settings).decide().actions, started(plan="full", **settings).decide().actions
    )


def folding_error(tmp_path: Path, sites: str) -> float:
    """How far multipliers move the keys and values and the actions, where weights are nearly exact."""
    tier = wide_tier(tmp_path, sites)
    path = tmp_path / "c.safetensors"
    results = []
    for multiplier in (False, True):
        save_calibration(path, made_up(tier, multiplier=multiplier))
        runner = started(precision=tier, calibration=str(path), unverified=True)
        runner.decide()
        results.append(np.concatenate([runner.session.read(name).ravel() for name in ("key_value", "actions")]))
    return float(np.linalg.norm(results[1] - results[0]) / np.linalg.norm(results[0]))


@pytest.mark.parametrize("part", ["vision", "prefix", "expert"])
def test_multipliers_cancel_in_every_part(tmp_path: Path, part: str) -> None:
    # A power of two moves no rounding of E4M3 weights under a scale for each output by more than that scale's own.
    assert folding_error(tmp_path, f"{part}.*") < 0.05


def test_vision_and_expert_fold_into_their_norms_and_the_prefix_keeps_its_multipliers(tmp_path: Path) -> None:
    policy = small_policy(**kept(tmp_path, "8-bit", multiplier=True))
    for site, matrix in site_matrices(policy.weights).items():
        assert isinstance(matrix, PackedWeight)
        assert (matrix.multiplier is not None) == (site.startswith("prefix.") and site in foldable_sites(policy.config))
    norm, before = policy.weights.vision.layers[0].norm1, WIDE.weights.vision.layers[0].norm1
    factors = torch.exp2(torch.arange(len(norm.weight)) % 3 - 1.0)
    assert torch.equal(norm.weight, before.weight * factors)
    assert torch.equal(norm.bias, before.bias * factors)


def test_an_adaptive_norm_takes_the_multiplier_in_scale_and_shift(tmp_path: Path) -> None:
    policy = small_policy(**kept(tmp_path, "8-bit", multiplier=True))
    tables = []
    for each in (policy, WIDE):
        session = Session(each.contract, each.bodies, "cpu")
        session.configure()
        session.replay("checkpoint")
        tables.append(torch.from_numpy(session.read("modulation")))
        session.close()
    folded, plain = tables
    factors = torch.exp2(torch.arange(plain.shape[-1]) % 3 - 1.0)
    norms = range(2 * policy.config.layers)
    for norm in norms:
        torch.testing.assert_close(1 + folded[:, norm, 0], (1 + plain[:, norm, 0]) * factors)
        torch.testing.assert_close(folded[:, norm, 1], plain[:, norm, 1] * factors)
        assert torch.equal(folded[:, norm, 2], plain[:, norm, 2])  # the gate belongs to the branch
    assert torch.equal(folded[:, -1], plain[:, -1])


# -- the contract ------------------------------------------------------------------------------------------------------


def test_the_tier_and_its_calibration_are_in_the_fingerprint(tmp_path: Path) -> None:
    one = small_policy(**kept(tmp_path, "8-bit"))
    other = small_policy(**kept(tmp_path, "8-bit", scale=0.06))
    assert one.contract.identity.precision.startswith("8-bit, ")
    assert one.contract.differences(other.contract) == ("precision",)
    assert WIDE.contract.differences(one.contract) == ("precision", "formats")
    assert Contract.from_json(one.contract.to_json()) == one.contract


def test_sixteen_bits_are_what_they_were() -> None:
    assert small_policy(precision="16-bit").contract.fingerprint == WIDE.contract.fingerprint
    assert WIDE.contract.formats == ()
    assert WIDE.fidelity == "16-bit, nothing to pass"


def test_sites_that_stay_wide_are_not_in_the_table(tmp_path: Path) -> None:
    tier = wide_tier(tmp_path)
    names = {item.name for item in narrow_formats(load_tier(tier), WIDE.config)}
    assert names == {name for name in SITES if name.startswith("expert.")}


# -- what does not start -----------------------------------------------------------------------------------------------


def refused(said: str, **changes: Any) -> None:
    with pytest.raises(SettingsError, match=said):
        small_policy(**changes)


def test_a_tier_without_a_calibration_does_not_start() -> None:
    refused("precision '8-bit' does not start without one", precision="8-bit")


def test_a_calibration_without_a_tier_is_a_mistake(tmp_path: Path) -> None:
    path = kept(tmp_path, "8-bit")["calibration"]
    refused("a 16-bit tier has none; remove it", calibration=path)


def test_an_unknown_tier_is_refused() -> None:
    refused("unknown precision '2-bit'", precision="2-bit")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"state_in_prompt": False}, "embodiment, normalisation"),
        ({"views": ("front",)}, "views, buffers, stages"),
        ({"steps": 4}, "buffers"),
        ({"chunk": 8}, "chunk, horizon, buffers"),
    ],
)
def test_a_calibration_of_another_policy_is_refused(tmp_path: Path, changes: dict[str, Any], field: str) -> None:
    refused(f"belongs to another contract; what differs: {field}", **kept(tmp_path, "8-bit"), **changes)


def test_a_calibration_with_a_multiplier_of_another_width_names_the_site(tmp_path: Path) -> None:
    settings, made = kept(tmp_path, "8-bit"), made_up("8-bit")
    scales = {**made.scales, "prefix.qkv.0": SiteScale(0.05, torch.ones(3))}
    save_calibration(Path(settings["calibration"]), dataclasses.replace(made, scales=scales))
    refused("site 'prefix.qkv.0' takes 192 inputs, its multiplier has 3", **settings)


def test_a_tier_that_was_not_verified_does_not_start(tmp_path: Path) -> None:
    settings = {**kept(tmp_path, "8-bit"), "unverified": False}
    refused("tier '8-bit' has not passed its fidelity gate.*flashrt verify --tier", **settings)


def test_a_tier_that_passed_starts_and_says_so(tmp_path: Path) -> None:
    settings = kept(tmp_path, "8-bit")
    policy = small_policy(**settings)
    assert policy.fidelity == "not enforced; never measured"
    bar = load_tier("8-bit").fidelity
    passed = Result(0.99999, 0.9999, "float32", 5, bar, ())
    record(Path(settings["calibration"]), policy.contract.fingerprint, passed, {})
    assert small_policy(**{**settings, "unverified": False}).fidelity.startswith("passed: cosine 0.999990")
    failed = Result(0.9, 0.9, "float32", 5, bar, ("global cosine 0.9 is below",))
    record(Path(settings["calibration"]), policy.contract.fingerprint, failed, {})
    refused("tier '8-bit' failed its fidelity gate: global cosine", **{**settings, "unverified": False})
    assert small_policy(**settings).fidelity.startswith("not enforced; FAILED")


def test_a_gpu_without_the_tensor_cores_is_refused_with_site_and_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(WIDE.config, **kept(tmp_path, "4-bit-blackwell"))
    chosen = tiers.choose_tier(config, WIDE.contract.identity)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(SettingsError, match=r"site 'prefix\.qkv\.0': nvfp4 activations need compute capability 10\.0"):
        tiers.require_gpu(chosen, torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (11, 0))
    tiers.require_gpu(chosen, torch.device("cuda"))


def test_fused_stages_take_a_tier() -> None:
    config = dataclasses.replace(true_config(), precision="8-bit", calibration="x")
    assert cuda_plan.unsuited(config, (9, 0)) == ""


# -- memory ------------------------------------------------------------------------------------------------------------


def test_the_memory_of_a_tier_is_that_of_its_packed_weights(true_weights: Pi05Weights) -> None:
    wide = dataclasses.replace(true_config(), max_pixels=1 << 32)  # so large that running takes more than packing
    kept = {"16-bit": weight_bytes(true_weights).stored + expert_bytes(true_weights, 16)}
    largest = 2 * wide.language_hidden * wide.language_width
    for name, bits in (("8-bit", 8.0), ("4-bit-expert", 4.5), ("4-bit", 4.5)):
        formats, copied = narrow_formats(load_tier(name), wide), expert_bytes(true_weights, bits)
        kept[name] = weight_bytes(true_weights, formats).stored + copied + 4 * 4 * largest
    needed = {name: needed_bytes(dataclasses.replace(wide, precision=name)) for name in kept}
    assert len({needed[name] - kept[name] for name in kept}) == 1


def expert_bytes(weights: Pi05Weights, bits: float) -> int:
    """What the expert's kernel copies: `bits` a weight, and a float32 factor for each output of narrow ones."""
    matrices = [matrix for site, matrix in site_matrices(weights).items() if site.startswith("expert.")]
    factors = 4 * sum(len(matrix) for matrix in matrices) if bits < 16 else 0
    return int(sum(matrix.numel() for matrix in matrices) * bits / 8) + factors


def test_packing_needs_both_at_once(true_weights: Pi05Weights) -> None:
    formats = narrow_formats(load_tier("8-bit"), true_config())
    both = weight_bytes(true_weights).stored + weight_bytes(true_weights, formats).stored
    assert needed_bytes(dataclasses.replace(true_config(), precision="8-bit")) > both


def test_the_memory_of_an_unknown_tier_is_a_mistake_in_the_settings() -> None:
    with pytest.raises(SettingsError, match="unknown precision '2-bit'"):
        needed_bytes(dataclasses.replace(true_config(), precision="2-bit"))


def test_what_was_packed_is_not_kept_in_16_bits_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wide: list[weakref.ref[Pi05Weights]] = []

    def watched(weights: Pi05Weights, chosen: tiers.ChosenTier, **options: bool) -> Pi05Weights:
        wide.append(weakref.ref(weights))
        return tiers.pack_weights(weights, chosen, **options)

    def gated(*_: object, **__: object) -> str:
        assert wide[0]() is None
        return ""

    monkeypatch.setattr(policy_module, "pack_weights", watched)
    monkeypatch.setattr(policy_module, "gate", gated)
    small_policy(**kept(tmp_path, "8-bit"))


def test_a_weight_that_is_not_finite_names_its_site(tmp_path: Path) -> None:
    def broken(site: str, matrix: Tensor) -> Tensor:
        return torch.full_like(matrix, float("nan")) if site == "prefix.down.0" else matrix

    config = dataclasses.replace(WIDE.config, **kept(tmp_path, "8-bit"))
    chosen = tiers.choose_tier(config, WIDE.contract.identity)
    assert chosen is not None
    with pytest.raises(SettingsError, match=r"site 'prefix\.down\.0': the weight holds a value that is not finite"):
        tiers.pack_weights(change_sites(WIDE.weights, broken), chosen)


def test_a_preset_s_yaml_can_be_given_as_a_file(tmp_path: Path) -> None:
    tier = wide_tier(tmp_path, "vision.*", "nvfp4", "e4m3")
    path = tmp_path / "c.safetensors"
    save_calibration(path, made_up(tier))
    policy: Pi05Policy = build({**SMALL, "precision": tier, "calibration": str(path), "unverified": True})
    assert policy.contract.identity.precision.startswith("mine, ")
    assert {item.name.split(".")[0] for item in policy.contract.formats} == {"vision"}
