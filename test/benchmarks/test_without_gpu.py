"""Benchmarks of kernels on a machine that has no GPU for them."""

from __future__ import annotations

import re

import pytest

from test.benchmarks.scripts import RESULTS, run


@pytest.mark.parametrize("name", ["expert", "products"])
def test_it_ends_with_one_line_and_leaves_the_result_alone(name: str) -> None:
    result = RESULTS / f"h200_{name}.json"
    before = result.read_bytes()
    found = run(name)
    assert found.returncode == 1
    assert re.fullmatch(rf"{name}: kernels are measured on a GPU, but .+\n", found.stderr), found.stderr
    assert result.read_bytes() == before
