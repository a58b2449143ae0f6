"""Formats of sites in a contract."""

from __future__ import annotations

import dataclasses
import json

import pytest

from flashrt_ros.contract import WIDE, Contract, ContractError, SiteFormat, show

from .builders import make_contract

FORMATS = (SiteFormat("a.qkv.0", "e4m3", "e4m3"), SiteFormat("a.qkv.1", "e4m3", "e4m3"), SiteFormat("b", "nvfp4"))
NARROW = dataclasses.replace(make_contract(), formats=FORMATS)


def test_a_contract_without_formats_says_nothing_of_them() -> None:
    plain = make_contract()
    assert "formats" not in json.loads(plain.to_json())
    assert "formats" not in show(plain)
    assert dataclasses.replace(plain, formats=()).fingerprint == plain.fingerprint


def test_formats_survive_the_round_trip_and_change_the_fingerprint() -> None:
    again = Contract.from_json(NARROW.to_json())
    assert again == NARROW
    assert again.fingerprint == NARROW.fingerprint != make_contract().fingerprint


def test_a_difference_shows_from_both_sides() -> None:
    assert NARROW.differences(make_contract()) == ("formats",)
    assert make_contract().differences(NARROW) == ("formats",)
    other = dataclasses.replace(NARROW, formats=FORMATS[:2])
    assert NARROW.differences(other) == ("formats",)


def test_the_readable_view_counts_sites_by_format() -> None:
    lines = [line.split() for line in show(NARROW).splitlines()]
    assert ["e4m3", "e4m3", "2", "sites"] in lines
    assert ["nvfp4", WIDE, "1", "sites"] in lines


def test_a_site_has_one_format() -> None:
    with pytest.raises(ContractError, match="site 'b' is declared 2 times"):
        dataclasses.replace(NARROW, formats=(*FORMATS, SiteFormat("b")))


def test_a_site_has_a_name_like_everything_else() -> None:
    with pytest.raises(ContractError, match="site name 'A B' is not allowed"):
        SiteFormat("A B")


@pytest.mark.parametrize("formats", [[{"name": "a"}, 3], [{"nme": "a"}], 3])
def test_malformed_formats_are_refused(formats: object) -> None:
    data = {**json.loads(NARROW.to_json()), "formats": formats}
    with pytest.raises(ContractError):
        Contract.from_json(json.dumps(data))
