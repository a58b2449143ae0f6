"""benchmarks/drop_in.py: what torch.compile makes of a model is added to what is known of it."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import drop_in as benchmark
from benchmarks.drop_in_models import MODELS, Setting, Workload
from test.sources import ROOT, checkout_environment

KNOWN = {"eager_ms": 3.0, "compile_ms": None, "compile_failed": "not finished after 1 s", "kept": ["cuda_graph"]}
COMPILED = {"eager_ms": 3.0, "compile_ms": 2.0, "compile_s": 9.0, "eager_beside_compile_ms": 3.1, "kept": []}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"models": {"timm_vit": KNOWN}}))
    return path


def small(setting: Setting) -> Workload:
    x = torch.zeros(2, 4, device=setting.device)
    return Workload(nn.Sequential(nn.Linear(4, 4)).eval(), "forward", [((x,), {})], "small")


def child(out: Path) -> tuple[int, dict[str, Any]]:
    arguments = argparse.Namespace(
        models="timm_vit", compile="", compile_only=True, compile_limit=60, device="cpu", tiny=True, rounds=6,
        most_sets=1, out=out,
    )  # fmt: skip
    code = benchmark.child(arguments)
    found: dict[str, Any] = json.loads(out.read_text())["models"]["timm_vit"]
    return code, found


def test_what_compile_makes_is_added_to_what_is_known(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "timm_vit", small)
    code, found = child(out)
    assert code == 0
    assert found["kept"] == ["cuda_graph"]
    assert found["eager_ms"] == 3.0
    assert found["compile_ms"] > 0
    assert found["compile_measured"]["cores"] > 0
    assert found["eager_beside_compile_ms"] > 0
    assert "compile_failed" not in found


def test_a_model_that_fails_keeps_what_is_known(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Setting) -> Workload:
        raise RuntimeError("no such weights")

    monkeypatch.setitem(MODELS, "timm_vit", broken)
    code, found = child(out)
    assert code == 1
    assert found["kept"] == ["cuda_graph"]
    assert found["compile_failed"] == "RuntimeError: no such weights"


def test_a_model_that_fails_later_keeps_nothing_of_an_earlier_compile(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Setting) -> Workload:
        raise RuntimeError("no such weights")

    out.write_text(json.dumps({"models": {"timm_vit": COMPILED}}))
    monkeypatch.setitem(MODELS, "timm_vit", broken)
    _, found = child(out)
    reason = "RuntimeError: no such weights"
    assert found == {"eager_ms": 3.0, "kept": [], "compile_ms": None, "compile_failed": reason}


def test_a_model_without_a_result_is_refused(out: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.drop_in", "--compile-only", "--models", "qwen3", "--out", str(out)]
    found = subprocess.run(command, cwd=ROOT, env=checkout_environment(), capture_output=True, text=True, timeout=120)
    assert found.returncode == 2
    assert "'qwen3' is not in" in found.stderr
    assert json.loads(out.read_text())["models"] == {"timm_vit": KNOWN}


def test_no_benchmark_hides_a_package() -> None:
    """Scripts put their folder in front of the path: a package of the same name would then be out of reach."""
    assert not set(packages_distributions()) & {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    assert not (ROOT / "benchmarks" / "accelerate.py").exists()  # installed where transformers is, and not here
