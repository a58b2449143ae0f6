"""The benchmarks as modules and as programs."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import ModuleType

from test.sources import ROOT, checkout_environment

FOLDER = ROOT / "benchmarks"
RESULTS = FOLDER / "results"


def module(name: str) -> ModuleType:
    """The benchmark `name`, which finds its neighbours as it does when it is run."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    return importlib.import_module(name)


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The benchmark as a program that sees no GPU."""
    command = [sys.executable, str(FOLDER / f"{name}.py"), *arguments]
    environment = {**checkout_environment(), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
