"""Receipts: complete, readable, replayed without a search, and refused where anything differs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flashrt_ros.accelerate import (
    Receipt,
    ReceiptError,
    Report,
    accelerate,
    available_structures,
    latency,
    registered,
    replay,
)
from test.accelerate.models import QUICK, PlantedNorm, RowByRowNorm, examples, mlp, traces, transformer


@pytest.fixture(scope="module")
def receipt() -> Receipt:
    report = accelerate(mlp(), examples(), gates=QUICK)
    report.detach()
    assert report.kept == ("fused_norm",)
    return report.receipt


def test_every_structure_has_a_verdict_with_a_reason(receipt: Receipt) -> None:
    assert {v.name for v in receipt.candidates} == {s.name for s in available_structures() if s.kind != "compile"}
    assert all(v.reason for v in receipt.candidates)
    kept = [v for v in receipt.candidates if v.verdict == "kept"]
    assert [(v.name, v.sites, v.against) for v in kept] == [("fused_norm", ("1",), "original")]
    assert kept[0].parity is not None
    assert kept[0].parity["passed"]
    assert kept[0].latency is not None
    assert kept[0].latency["interval"][0] > 1
    assert receipt.result["parity"]["passed"]
    assert receipt.result["latency"]["speedup"] >= receipt.gates["speedup"]


def test_a_receipt_is_json_and_comes_back_equal(receipt: Receipt, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "receipt.json"
    receipt.save(path)
    assert Receipt.load(path) == receipt
    values = json.loads(path.read_text())
    assert set(values) == {
        "version", "model", "environment", "gates", "candidates", "search", "result", "digest",
    }  # fmt: skip
    assert [entry.name for entry in path.parent.iterdir()] == ["receipt.json"]


def test_replaying_activates_what_was_kept_without_a_search(
    receipt: Receipt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receipt.save(tmp_path / "receipt.json")
    monkeypatch.setattr(latency, "compare", None)  # nothing may be timed
    model, x = mlp(), examples()[0]
    marks = traces(model)
    with torch.no_grad(), replay(model, tmp_path / "receipt.json", examples()) as report:
        norm = model[1]
        assert isinstance(norm, RowByRowNorm)
        expected = RowByRowNorm.forward(norm, model[0](x))
        assert report.kept == ("fused_norm",)
        assert "forward" in vars(norm)
        torch.testing.assert_close(norm(model[0](x)), expected, rtol=1e-5, atol=1e-5)
    assert traces(model) == marks


def other_weights() -> nn.Module:
    model = mlp()
    with torch.no_grad():
        next(model.parameters())[3, 5] += 1e-6
    return model


def other_module() -> nn.Module:
    model = mlp()
    model[2] = nn.GELU(approximate="tanh")
    return model


class Named(nn.Sequential):
    pass


MODELS: dict[str, Callable[[], nn.Module]] = {
    "model.weights": other_weights,
    "model.structure": other_module,
    "model.class": lambda: Named(*mlp()).eval(),
}


@pytest.mark.parametrize("field", MODELS)
def test_another_model_is_refused_by_the_name_of_what_differs(receipt: Receipt, field: str) -> None:
    model = MODELS[field]()
    marks = traces(model)
    with pytest.raises(ReceiptError, match=f"another model: {field} is") as caught:
        replay(model, receipt, examples())
    assert caught.value.field == field
    assert traces(model) == marks


def test_other_examples_or_another_method_are_refused(receipt: Receipt) -> None:
    with pytest.raises(ReceiptError) as caught:
        replay(mlp(), receipt, examples(rows=7))
    assert caught.value.field == "model.examples"


@pytest.mark.parametrize("field", ["python", "torch", "cpu", "threads", "structures", "matmul_precision"])
def test_another_environment_is_refused_by_the_name_of_what_differs(receipt: Receipt, field: str) -> None:
    elsewhere = replace(receipt, environment={**receipt.environment, field: "another"})
    with pytest.raises(ReceiptError, match=f"environment.{field} is .* here and 'another' in the receipt") as caught:
        replay(mlp(), elsewhere, examples())
    assert caught.value.field == f"environment.{field}"


def test_a_gpu_that_is_not_here_is_refused(receipt: Receipt) -> None:
    elsewhere = replace(receipt, environment={**receipt.environment, "gpu": "NVIDIA H200"})
    with pytest.raises(ReceiptError, match=r"environment\.gpu"):
        replay(mlp(), elsewhere, examples())


def test_a_structure_more_or_less_in_the_registry_is_another_environment(receipt: Receipt) -> None:
    with registered(PlantedNorm("planted", lambda y: y)), pytest.raises(ReceiptError, match=r"environment\.structures"):
        replay(mlp(), receipt, examples())


TAMPERED: dict[str, Callable[[dict[str, Any]], object]] = {
    "a verdict": lambda values: values["candidates"][0].update(verdict="kept"),
    "the kept set": lambda values: values["result"].update(kept=["packed_linears"]),
    "a gate": lambda values: values["gates"].update(cosine_global=-1.0),
    "a cosine": lambda values: values["result"]["parity"].update(cosine_worst=0.5),
    "the weights": lambda values: values["model"].update(weights="0" * 64),
    "an entry more": lambda values: values["environment"].update(note="trust me"),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_an_edited_receipt_is_refused(receipt: Receipt, tmp_path: Path, what: str) -> None:
    path = tmp_path / "receipt.json"
    receipt.save(path)
    values = json.loads(path.read_text())
    TAMPERED[what](values)
    path.write_text(json.dumps(values))
    with pytest.raises(ReceiptError, match="was changed after it was written") as caught:
        replay(mlp(), path, examples())
    assert caught.value.field == "digest"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 1}', "not JSON"])
def test_what_is_no_receipt_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "receipt.json"
    path.write_text(text)
    with pytest.raises(ReceiptError, match=r"cannot read receipt|is no receipt"):
        Receipt.load(path)
    with pytest.raises(ReceiptError, match="cannot read receipt"):
        Receipt.load(tmp_path / "absent.json")


def test_another_version_is_refused(receipt: Receipt) -> None:
    with pytest.raises(ReceiptError, match="has version 2, this package reads 1"):
        Receipt.from_dict({**receipt.to_dict(), "version": 2})


def test_a_kernel_that_went_wrong_since_is_refused_at_replay() -> None:
    faults = [1.0]
    model, inputs = transformer(), examples()
    planted = PlantedNorm("planted", lambda y: y * faults[0])
    planted.kind = "precision"
    with registered(planted):
        report: Report = accelerate(model, inputs, gates=QUICK, kinds=("precision",))
        report.detach()
        assert report.kept == ("planted",)
        faults[0] = 1.2
        with pytest.raises(ReceiptError, match="is in the receipt, but cannot be prepared"):
            replay(model, report.receipt, inputs)
        faults[0] = 1.04  # its site allows that, the complete call does not
        tight = replace(report.receipt, gates={**report.receipt.gates, "dimension_error": 1e-3})
        with pytest.raises(ReceiptError, match="is not the original any more: relative error"):
            replay(model, tight, inputs)
