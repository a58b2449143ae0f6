from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashrt_ros.ops import ShapeError, check


def test_agreeing_shapes_pass() -> None:
    check("op", x=(torch.zeros(3, 4), "rows width"), w=(torch.zeros(4), "width"), n=(torch.zeros(1), "1"))


def test_a_disagreeing_dimension_names_op_argument_dimension_expected_and_got() -> None:
    with pytest.raises(ShapeError, match=r"rms_norm: 'w' dimension 0 'width' must be 4 \(from 'x'\), got 5"):
        check("rms_norm", x=(torch.zeros(3, 4), "rows width"), w=(torch.zeros(5), "width"))


def test_a_fixed_dimension_says_what_it_must_be() -> None:
    with pytest.raises(ShapeError, match=r"op: 'start' dimension 0 must be 1 \(fixed\), got 2"):
        check("op", start=(torch.zeros(2), "1"))


def test_a_wrong_number_of_dimensions_lists_the_expected_ones() -> None:
    with pytest.raises(ShapeError, match=r"op: 'x' needs 2 dimensions \[rows, width\], got \[3\]"):
        check("op", x=(torch.zeros(3), "rows width"))


def test_an_integer_in_a_tuple_spec_is_fixed() -> None:
    check("op", x=(torch.zeros(2, 6), ("rows", 6)))
    with pytest.raises(ShapeError, match="dimension 1 must be 6"):
        check("op", x=(torch.zeros(2, 7), ("rows", 6)))


def test_a_refusal_is_repeated_although_verdicts_are_remembered() -> None:
    for _ in range(2):
        with pytest.raises(ShapeError):
            check("op", x=(torch.zeros(2), "3"))


@given(st.integers(1, 5), st.integers(1, 5))
def test_a_name_binds_to_one_size(first: int, second: int) -> None:
    arguments = {"a": (torch.zeros(first), "n"), "b": (torch.zeros(second), "n")}
    if first == second:
        check("op", **arguments)
    else:
        with pytest.raises(ShapeError, match=f"must be {first} .*got {second}"):
            check("op", **arguments)
