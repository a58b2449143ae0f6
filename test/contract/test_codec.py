"""Fingerprint, canonical JSON and the readable view."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrt_ros.contract import (
    Buffer,
    Contract,
    ContractError,
    DType,
    Extent,
    Rate,
    Region,
    Role,
    Stage,
    Variant,
    show,
)

from .builders import BUFFERS, IDENTITY, REGIONS, STAGES, make_contract, replaced


def test_json_round_trip_keeps_everything() -> None:
    contract = make_contract()
    again = Contract.from_json(contract.to_json())
    assert again == contract
    assert again.to_json() == contract.to_json()
    assert again.fingerprint == contract.fingerprint


def test_documentation_does_not_change_the_fingerprint() -> None:
    documented = replaced(BUFFERS, "kv", dataclasses.replace(BUFFERS[5], doc="keys and values"))
    assert make_contract(buffers=documented).fingerprint == make_contract().fingerprint


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"identity": dataclasses.replace(IDENTITY, weights="cd" * 32)}, ("weights",)),
        (
            {"identity": dataclasses.replace(IDENTITY, views=("front", "wrist"), chunk=5)},
            ("views", "chunk"),
        ),
        ({"regions": REGIONS[:1]}, ("regions",)),
        (
            {"buffers": replaced(BUFFERS, "hidden", dataclasses.replace(BUFFERS[6], shape=(5,)))},
            ("buffers",),
        ),
        (
            {
                "variants": (
                    Variant("short", {"tokens": 3}),
                    Variant("long", {"tokens": 4}),
                )
            },
            ("variants",),
        ),
        ({"name": "toy2"}, ("name",)),
    ],
)
def test_every_meaningful_change_moves_the_fingerprint_and_is_named(
    changes: dict[str, Any], named: tuple[Any, ...]
) -> None:
    contract, other = make_contract(), make_contract(**changes)
    assert contract.fingerprint != other.fingerprint
    assert contract.differences(other) == named


def test_the_fingerprint_is_the_same_in_another_process() -> None:
    code = (
        "import sys; from flashrt_ros.contract import Contract; print(Contract.from_json(sys.stdin.read()).fingerprint)"
    )
    contract = make_contract()
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=contract.to_json(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == contract.fingerprint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "invalid JSON"),
        ("[1]", "expected a JSON object"),
        ('{"schema": 99}', "schema 99 is not supported"),
        ('{"schema": 1}', "field or name 'name' is missing"),
        ("[" * 100_000, "invalid JSON"),
    ],
)
def test_text_that_is_no_contract(text: str, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        Contract.from_json(text)


def test_an_altered_file_is_refused() -> None:
    data = json.loads(make_contract().to_json())
    data["identity"]["chunk"] = 5
    with pytest.raises(ContractError, match="it was altered"):
        Contract.from_json(json.dumps(data))


@pytest.mark.parametrize(
    "path",
    [
        ("buffers", 0, "dtype"),
        ("buffers", 0, "role"),
        ("stages", 0, "rate"),
        ("regions", 0, "offset"),
    ],
)
@pytest.mark.parametrize("value", ["nonsense", None, 1.5, [], {}])
def test_wrong_values_are_contract_errors(path: tuple[Any, ...], value: object) -> None:
    data = json.loads(make_contract().to_json())
    data[path[0]][path[1]][path[2]] = value
    with pytest.raises(ContractError):
        Contract.from_json(json.dumps(data))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda c: st.lists(c) | st.dictionaries(st.text(), c),
    )
)
def test_any_json_is_a_contract_or_a_contract_error(value: object) -> None:
    with pytest.raises(ContractError):
        Contract.from_json(
            json.dumps(
                {
                    "schema": 1,
                    "name": "x",
                    "buffers": value,
                    "stages": value,
                    "identity": value,
                }
            )
        )


_names = st.lists(
    st.from_regex(r"[a-z][a-z0-9_]{0,6}", fullmatch=True),
    min_size=1,
    max_size=6,
    unique=True,
)


@given(names=_names, data=st.data())
def test_random_chains_round_trip_and_run_in_dependency_order(names: list[str], data: st.DataObject) -> None:
    buffers = [Buffer("start", (1,), DType.INT32, Role.SWAP, Rate.CHECKPOINT)]
    buffers += [Buffer(f"b_{n}", (data.draw(st.integers(1, 9)),), DType.FLOAT32, Role.STATE) for n in names]
    regions = [Region(f"r_{n}", f"b_{n}", 0, b.nbytes) for n, b in zip(names, buffers[1:], strict=True)]
    rates = sorted(data.draw(st.lists(st.sampled_from(Rate), min_size=len(names), max_size=len(names))))
    reads = ["start", *(f"b_{n}" for n in names[:-1])]
    stages = [Stage(f"s_{n}", rate, (read,), (f"b_{n}",)) for n, rate, read in zip(names, rates, reads, strict=True)]
    shuffled = data.draw(st.permutations(stages))
    contract = Contract("chain", tuple(buffers), tuple(shuffled), IDENTITY, tuple(regions))
    assert [stage.name for stage in contract.order] == [stage.name for stage in stages]
    assert Contract.from_json(contract.to_json()) == contract


def test_show_names_every_part() -> None:
    contract = make_contract()
    text = show(contract)
    assert contract.fingerprint in text
    parts: tuple[Any, ...] = (*BUFFERS, *STAGES, *REGIONS, *contract.variants)
    for part in parts:
        assert part.name in text
    assert text.index("tables   checkpoint") < text.index("context   observation")
    assert "first 'rows' of 6 rows in each of 2 block(s)" in text


def test_show_survives_a_contract_without_regions() -> None:
    stages = (Stage("only", Rate.CHECKPOINT, writes=("out",)),)
    buffers = (Buffer("out", (1,), DType.FLOAT32, Role.SWAP),)
    text = show(Contract("bare", buffers, stages, IDENTITY, extents=(Extent("e", 1),)))
    assert "capsule regions" not in text
    assert "default" in text


def test_the_contract_package_needs_neither_torch_nor_numpy() -> None:
    code = "import sys, flashrt_ros.contract; print(sorted({'torch', 'numpy', 'rclpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
