"""Buffers, stages, regions and extents refuse what can't be meant."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from flashrt_ros.contract import (
    Buffer,
    ContractError,
    DType,
    Extent,
    Identity,
    Rate,
    Region,
    Role,
    Stage,
    Variant,
)


@pytest.mark.parametrize("name", ["", "Image", "1st", "a b", "../x", "é", 7])
def test_names_outside_the_alphabet_are_refused(name: object) -> None:
    with pytest.raises(ContractError, match="buffer name"):
        Buffer(name, (1,), DType.UINT8, Role.STATE)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(), (0,), (2, -1), (1.5,)])
def test_shapes_need_positive_integers(shape: tuple[Any, ...]) -> None:
    with pytest.raises(ContractError, match="positive integers"):
        Buffer("b", shape, DType.UINT8, Role.STATE)


@pytest.mark.parametrize("role", [Role.STATIC, Role.STATE, Role.SCRATCH])
def test_only_windows_have_a_rate(role: Role) -> None:
    with pytest.raises(ContractError, match="only a SWAP window"):
        Buffer("b", (1,), DType.UINT8, role, Rate.PROMPT)


@pytest.mark.parametrize(
    ("dtype", "nbytes"),
    [(DType.UINT8, 6), (DType.BFLOAT16, 12), (DType.FLOAT32, 24), (DType.INT64, 48)],
)
def test_nbytes_counts_elements_times_their_size(dtype: DType, nbytes: int) -> None:
    assert Buffer("b", (2, 3), dtype, Role.STATE).nbytes == nbytes


def test_a_list_as_shape_is_frozen_into_a_tuple() -> None:
    assert Buffer("b", [2, 3], DType.UINT8, Role.STATE).shape == (2, 3)  # type: ignore[arg-type]


def test_a_stage_that_writes_nothing_is_refused() -> None:
    with pytest.raises(ContractError, match="writes no buffer"):
        Stage("s", Rate.STEP, reads=("a",))


def test_a_stage_that_lists_a_buffer_twice_is_refused() -> None:
    with pytest.raises(ContractError, match="reads lists 'a' twice"):
        Stage("s", Rate.STEP, reads=("a", "a"), writes=("b",))


@pytest.mark.parametrize(("offset", "nbytes", "blocks"), [(-1, 4, 1), (0, 0, 1), (0, 4, 0)])
def test_regions_need_sensible_numbers(offset: int, nbytes: int, blocks: int) -> None:
    with pytest.raises(ContractError, match="must be at least"):
        Region("r", "b", offset, nbytes, blocks)


def test_region_bytes_must_divide_into_blocks() -> None:
    with pytest.raises(ContractError, match="do not divide into 3"):
        Region("r", "b", 0, 16, blocks=3)


@pytest.mark.parametrize("maximum", [0, -1, 2.5])
def test_extents_need_a_positive_maximum(maximum: object) -> None:
    with pytest.raises(ContractError, match="not a positive integer"):
        Extent("rows", maximum)  # type: ignore[arg-type]


def test_variants_need_positive_sizes() -> None:
    with pytest.raises(ContractError, match="dimension 'tokens' is 0"):
        Variant("v", {"tokens": 0})


def test_variants_cannot_be_changed_through_their_mapping() -> None:
    dims = {"tokens": 2}
    variant = Variant("v", dims)
    dims["tokens"] = 3
    assert variant.dims["tokens"] == 2
    with pytest.raises(TypeError):
        variant.dims["tokens"] = 3  # type: ignore[index]


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Identity)])
def test_identity_names_each_field_that_differs(field: str) -> None:
    one = Identity(policy="p", weights="w")
    value: Any = 99 if field in ("chunk", "horizon") else ("x",) if field == "views" else "other"
    assert one.differences(dataclasses.replace(one, **{field: value})) == (field,)


def test_equal_identities_have_no_differences() -> None:
    assert Identity(policy="p", weights="w").differences(Identity(policy="p", weights="w")) == ()
