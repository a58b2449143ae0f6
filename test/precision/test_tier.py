"""Tiers: presets, a user's own table, and every way to write one wrongly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from flashrt_ros.contract import SiteFormat
from flashrt_ros.precision.errors import TierError
from flashrt_ros.precision.tier import load_tier, presets

SITES = ("vision.qkv.0", "vision.up.0", "prefix.embedding", "prefix.qkv.0", "expert.down.0")
GOOD: dict[str, Any] = {
    "tier": "mine",
    "fidelity": {"cosine_global": 0.999, "cosine_worst": 0.99},
    "rules": [
        {"sites": "vision.[qu]*.0", "weight": "16-bit", "activation": "16-bit", "why": "a"},
        {"sites": "*", "weight": "e4m3", "activation": "e4m3", "why": "b"},
    ],
}


def write(folder: Path, data: Any) -> str:
    path = folder / "tier.yaml"
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
    return str(path)


def test_the_presets_are_found_widest_first() -> None:
    assert presets() == ("16-bit", "8-bit", "4-bit", "4-bit-blackwell", "4-bit-expert")
    assert all(load_tier(name).name == name for name in presets())


def test_only_the_widest_preset_needs_no_calibration() -> None:
    assert [name for name in presets() if load_tier(name).wide] == ["16-bit"]


def test_the_bars_are_those_that_the_tiers_promise() -> None:
    assert load_tier("8-bit").fidelity.cosine_global >= 0.9995
    assert load_tier("8-bit").fidelity.cosine_worst >= 0.999
    for name in presets()[2:]:
        assert load_tier(name).fidelity.cosine_global >= 0.999
        assert load_tier(name).fidelity.cosine_worst >= 0.995


def test_every_rule_of_every_preset_says_why() -> None:
    assert all(len(rule.why) > 10 for name in presets() for rule in load_tier(name).rules)


def test_the_first_rule_that_matches_decides(tmp_path: Path) -> None:
    formats = load_tier(write(tmp_path, GOOD)).formats(SITES)
    assert formats[0] == SiteFormat("vision.qkv.0")
    assert formats[0].wide
    assert formats[-1] == SiteFormat("expert.down.0", "e4m3", "e4m3")


def test_a_site_without_a_rule_is_named(tmp_path: Path) -> None:
    tier = load_tier(write(tmp_path, {**GOOD, "rules": GOOD["rules"][:1]}))
    with pytest.raises(TierError, match="tier 'mine' has no rule for site 'prefix.embedding'"):
        tier.formats(SITES)


def test_a_rule_that_decides_nothing_is_a_mistake(tmp_path: Path) -> None:
    rule = {"sites": "expert.dwon.*", "weight": "nvfp4", "activation": "16-bit", "why": "c"}
    tier = load_tier(write(tmp_path, {**GOOD, "rules": [rule, *GOOD["rules"]]}))
    with pytest.raises(TierError, match=r"rule 'expert\.dwon\.\*' decides no site.*nearest being 'expert\.down\.0'"):
        tier.formats(SITES)


RULE = GOOD["rules"][1]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("tier: [", "not valid YAML"),
        ("- 1", "expected the keys fidelity, rules, tier, found a list"),
        ({**GOOD, "extra": 1}, "found extra, fidelity, rules, tier"),
        ({**GOOD, "tier": 8}, "'tier' is 8"),
        ({**GOOD, "rules": []}, "'rules' must be a list"),
        ({**GOOD, "rules": [{**RULE, "why": ""}]}, "'why' of a rule is ''"),
        ({**GOOD, "rules": [{**RULE, "weight": 16}]}, "'weight' of a rule is 16, expected text"),
        ({**GOOD, "rules": [{**RULE, "weight": "int4"}]}, r"rule '\*': unknown weight format 'int4'"),
        ({**GOOD, "rules": [{**RULE, "activation": "nvfp4"}]}, r"rule '\*': nvfp4 activations cannot meet"),
        ({**GOOD, "rules": [{"sites": "*"}]}, "a rule: expected the keys activation, sites, weight, why"),
        ({**GOOD, "fidelity": {"cosine_global": 0.9}}, "'fidelity': expected the keys cosine_global, cosine_worst"),
        ({**GOOD, "fidelity": {"cosine_global": 1.5, "cosine_worst": 0.9}}, "'cosine_global' is 1.5"),
        ({**GOOD, "fidelity": {"cosine_global": True, "cosine_worst": 0.9}}, "'cosine_global' is True"),
        ({**GOOD, "fidelity": {"cosine_global": float("nan"), "cosine_worst": 0.9}}, "'cosine_global' is nan"),
    ],
)
def test_a_malformed_tier_says_where_and_what(tmp_path: Path, data: Any, said: str) -> None:
    with pytest.raises(TierError, match=said) as caught:
        load_tier(write(tmp_path, data))
    assert "tier.yaml" in str(caught.value)


def test_neither_a_preset_nor_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TierError, match="unknown precision '6-bit'; expected one of 16-bit, 8-bit"):
        load_tier("6-bit")
    with pytest.raises(TierError, match=r"cannot read tier '.*missing\.yaml'"):
        load_tier(str(tmp_path / "missing.yaml"))
