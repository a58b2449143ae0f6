"""Kernels that cannot be compiled here are told before anything is loaded."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from flashrt_ros.engine import DeviceError
from flashrt_ros.ops import requirements
from flashrt_ros.ops.cuda import compiler
from flashrt_ros.ops.cuda.errors import KernelError
from flashrt_ros.ops.requirements import require_kernels

GPU = torch.device("cuda", 0)


def test_a_compiler_that_is_missing_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise KernelError("NVRTC cannot be loaded (no such library); install it with `pip install flashrt_ros[cuda]`")

    monkeypatch.setattr(requirements, "compiler_version", missing)
    with pytest.raises(DeviceError, match="kernels for 'cuda:0' cannot be compiled: NVRTC cannot be loaded") as caught:
        require_kernels(GPU)
    assert "\n" not in str(caught.value)
    require_kernels(torch.device("cpu"))


def test_a_library_that_cannot_be_opened_is_a_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")

    def unloadable() -> None:
        raise RuntimeError("Failure finding libnvrtc.so\nmore of it")

    monkeypatch.setattr(nvrtc, "nvrtcVersion", unloadable)
    with pytest.raises(KernelError, match=r"NVRTC cannot be loaded \(Failure finding libnvrtc.so\); install it"):
        compiler.compiler_version()


def test_a_launcher_that_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "cuda.core" else real(name))
    with pytest.raises(DeviceError, match=r"need cuda-core; install it with `pip install flashrt_ros\[cuda\]`"):
        require_kernels(GPU)


def test_this_installation_has_both() -> None:
    pytest.importorskip("cuda.core")
    require_kernels(GPU)
