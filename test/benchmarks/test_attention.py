"""benchmarks/attention.py, as far as it goes without a GPU, and one size on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from test.benchmarks.scripts import module, run

attention = module("attention")


def test_an_unknown_attention_is_refused_with_those_that_there_are() -> None:
    found = run("attention", "--only", "image,text")
    assert found.returncode == 2
    assert "unknown attention 'text'; there are: image, prefix" in found.stderr


def test_without_a_gpu_it_says_so_in_one_line() -> None:
    found = run("attention")
    assert found.returncode == 1
    assert found.stdout == ""
    (line,) = found.stderr.splitlines()
    assert line.startswith("attention: kernels are measured on a GPU, but ")


def test_a_result_that_is_not_there_is_named(tmp_path: Path) -> None:
    found = run("attention", "--show", str(tmp_path / "none.json"))
    assert found.returncode == 2
    assert "there is no result" in found.stderr
    assert "none.json" in found.stderr


def test_a_result_is_shown_with_what_was_refused(tmp_path: Path) -> None:
    ways = [
        {"way": "own", "variant": {"CLUSTER": 4}, "us": 7.5, "distance": 0.002},
        {"way": "own", "variant": {}, "refused": "no such instruction"},
    ]
    (tmp_path / "result.json").write_text(json.dumps({"attention": {"image": {"2": ways}}}))
    found = run("attention", "--show", str(tmp_path / "result.json"))
    assert found.returncode == 0, found.stderr
    assert "CLUSTER 4" in found.stdout
    assert "7.5" in found.stdout
    assert "no such instruction" in found.stdout


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
@pytest.mark.parametrize(("kind", "size"), [("image", 2), ("prefix", 712)])
def test_every_way_is_measured_and_right(kind: str, size: int) -> None:
    found = attention.measured(kind, size, torch.device("cuda", 0))
    assert not [way for way in found if "refused" in way]
    assert all(way["distance"] < (0.05 if "codes" in way["way"] else 0.005) for way in found)
