"""`flashrt accelerate` on a factory, with its receipt."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from flashrt_ros.cli import main

FACTORY = """
import torch
from test.accelerate.models import RowByRowNorm, examples, mlp

def make(device):
    return mlp().to(device), examples()

class Policy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()
    def act(self, observation):
        return self.net(observation)

def policy(device):
    return Policy().eval(), [{"observation": x} for x in examples()], "act"

def wrong(device):
    return mlp()

def without_device():
    return mlp(), examples()

def failing(device):
    raise LookupError("no weights here")

def one_example(device):
    return mlp(), examples()[0]
"""
QUICK = ["--rounds", "7"]


@pytest.fixture(autouse=True)
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_factory.py").write_text(FACTORY)
    (tmp_path / "broken_factory.py").write_text("def make(device:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("my_factory", None)


def test_a_model_is_accelerated_and_its_receipt_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    receipt = tmp_path / "receipt.json"
    assert main(["accelerate", "--module", "my_factory:make", *QUICK, "--out", str(receipt)]) == 0
    printed = capsys.readouterr()
    assert "kept: fused_norm" in printed.out
    assert "needs a GPU" in printed.out
    assert "judging fused_norm" in printed.err
    assert json.loads(receipt.read_text())["result"]["kept"] == ["fused_norm"]
    assert main(["accelerate", "--module", "my_factory:make", "--replay", str(receipt)]) == 0
    printed = capsys.readouterr()
    assert "kept: fused_norm" in printed.out
    assert "judging" not in printed.err


def test_any_method_can_be_the_complete_call(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["accelerate", "--module", "my_factory:policy", *QUICK]) == 0
    assert "Policy.act" in capsys.readouterr().out


def test_where_nothing_passes_the_exit_code_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["accelerate", "--module", "my_factory:make", "--speedup", "1e6", *QUICK]) == 1
    assert "kept: nothing; the model is as it was" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--module", "my_factory"], "must be package.module:factory"),
        (["--module", "my_factory:absent"], "cannot import 'my_factory:absent'"),
        (["--module", "my_factory:wrong"], r"must return (model, examples)"),
        (["--module", "my_factory:without_device"], "was called with one argument, the device, and raised TypeError"),
        (["--module", "my_factory:failing"], "raised LookupError: no weights here"),
        (["--module", "my_factory:one_example"], "must return its examples as a list of calls"),
        (["--module", "broken_factory:make"], "cannot import 'broken_factory:make': SyntaxError"),
        (["--policy", "hub:somebody/model"], "expected lerobot:PATH"),
        (["--module", "my_factory:make", "--rounds", "2"], "gate 'rounds' is 2"),
        (["--module", "my_factory:make", "--replay", "absent.json"], "cannot read receipt 'absent.json'"),
        (["--module", "my_factory:make", "--device", "cuda:7"], "device 'cuda:7'"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["accelerate", *arguments]) == 2
    error = capsys.readouterr().err.splitlines()
    assert message in error[-1]
