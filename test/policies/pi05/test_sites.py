"""The names of sites, and those without a matrix: what the prefix's attention multiplies as codes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from flashrt_ros.policies.pi05.sites import site_matrices, site_names
from flashrt_ros.policies.pi05.tiers import narrow_formats
from flashrt_ros.precision.calibration import SiteScale, save_calibration
from flashrt_ros.precision.errors import TierError
from flashrt_ros.precision.packed import PackedWeight
from flashrt_ros.precision.tier import load_tier
from test.policies.pi05.test_tiers import OPERANDS, SITES, WIDE, kept, made_up, refused, true_config, wide_tier
from test.policies.pi05.tiny import small_policy, started


def test_every_site_but_attentions_has_a_matrix_and_every_matrix_one_name() -> None:
    matrices = site_matrices(WIDE.weights)
    assert tuple(matrices) == tuple(site for site in SITES if site not in OPERANDS)
    assert len({id(matrix) for matrix in matrices.values()}) == len(matrices)


def test_at_true_size_the_sites_are_those_of_pi05() -> None:
    names = site_names(true_config())
    assert len(names) == 27 * 4 + 1 + 17 * (4 + 3) + 1 + 18 * 4
    assert {"vision.down.26", "prefix.embedding", "prefix.qkv.17", "expert.gate_up.17"} <= set(names)
    assert {"prefix.attention.query.0", "prefix.attention.key.16"} <= set(names)
    assert "prefix.output.17" not in names


def test_attention_multiplies_codes_where_its_product_gives_them(tmp_path: Path) -> None:
    weights = small_policy(**kept(tmp_path, "8-bit", scale=0.07)).weights.prefix
    for layer in weights.layers:
        assert isinstance(layer.qkv, PackedWeight)
        assert layer.qkv.output_scales is not None
        assert torch.equal(layer.qkv.output_scales, torch.full((3,), 0.07))
    assert isinstance(weights.last_key_value, PackedWeight)
    assert weights.last_key_value.output_scales is None  # its layer has no attention
    decoded = small_policy(**kept(tmp_path, "4-bit")).weights.prefix.layers[0].qkv
    assert isinstance(decoded, PackedWeight)
    assert decoded.output_scales is None


def test_the_codes_of_attention_move_what_is_decided(tmp_path: Path) -> None:
    settings, made = kept(tmp_path, "8-bit"), made_up("8-bit")
    fine = started(**settings).decide().actions
    coarse = {site: SiteScale(1.0) if site in OPERANDS else scale for site, scale in made.scales.items()}
    save_calibration(Path(settings["calibration"]), dataclasses.replace(made, scales=coarse))
    assert not np.array_equal(fine, started(**settings).decide().actions)


def test_operands_of_attention_have_a_format_of_their_own_and_no_weight() -> None:
    formats = {item.name: item for item in narrow_formats(load_tier("8-bit"), WIDE.config)}
    assert {formats[site].weight for site in OPERANDS} == {"16-bit"}
    assert {formats[site].activation for site in OPERANDS} == {"e4m3"}
    assert not {item.name for item in narrow_formats(load_tier("4-bit"), WIDE.config)} & OPERANDS


@pytest.mark.parametrize(
    ("sites", "weight", "activation"),
    [
        ("prefix.*", "nvfp4", "e4m3"),  # decoded weights
        ("prefix.*", "nvfp4", "nvfp4"),
        ("prefix.attention.*", "e4m3", "e4m3"),  # a 16-bit product
        ("prefix.[qa]*[vy].*", "e4m3", "e4m3"),  # queries and keys alone
    ],
)
def test_attention_of_codes_that_nothing_makes_is_refused(
    tmp_path: Path, sites: str, weight: str, activation: str
) -> None:
    tier = load_tier(wide_tier(tmp_path, sites, weight, activation))
    with pytest.raises(TierError, match=r"site 'prefix.attention.query.0': attention multiplies .*prefix.attention.\*"):
        narrow_formats(tier, WIDE.config)


def test_a_calibration_without_the_scales_of_attention_is_refused(tmp_path: Path) -> None:
    settings, made = kept(tmp_path, "8-bit"), made_up("8-bit")
    scales = {site: scale for site, scale in made.scales.items() if site not in OPERANDS}
    save_calibration(Path(settings["calibration"]), dataclasses.replace(made, scales=scales))
    refused("has no site 'prefix.attention.query.0'; calibrate again", **settings)
