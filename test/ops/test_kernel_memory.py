"""Shared memory that launches of one loaded kernel may have, without a GPU: only what the driver is asked for."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from flashrt_ros.ops.cuda import kernel as module
from flashrt_ros.ops.cuda.compiler import KernelSource
from flashrt_ros.ops.cuda.errors import KernelError
from flashrt_ros.ops.cuda.kernel import Kernel

SOURCE, DEVICE = KernelSource("capsule", {}), torch.device("cuda", 0)
LIMIT = 200_000


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What the driver is asked for, in order; it refuses more than LIMIT."""
    asked: list[tuple[str, int]] = []

    def allow(self: Kernel, nbytes: int) -> None:
        if nbytes > LIMIT:
            raise KernelError(f"no {nbytes} bytes")
        asked.append((self.name, nbytes))

    loaded = module._Loaded(SimpleNamespace(get_kernel=lambda function: function))
    monkeypatch.setattr(module, "_load", lambda *of: loaded)
    monkeypatch.setattr(module, "architecture", lambda device: "sm_90a")
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(Kernel, "_allow_shared", allow)
    return asked


def test_it_is_never_lowered_for_launches_that_were_prepared_before(asked: list[tuple[str, int]]) -> None:
    for nbytes in (115_713, 84_088, 115_713, 120_000, 0):
        assert Kernel(SOURCE, "first", DEVICE, nbytes).shared_bytes == nbytes
    assert asked == [("first", 115_713), ("first", 120_000)]


def test_each_function_has_its_own(asked: list[tuple[str, int]]) -> None:
    Kernel(SOURCE, "first", DEVICE, 1000)
    Kernel(SOURCE, "second", DEVICE, 500)
    assert asked == [("first", 1000), ("second", 500)]


def test_what_the_driver_refused_is_not_taken_for_allowed(asked: list[tuple[str, int]]) -> None:
    for _ in range(2):
        with pytest.raises(KernelError, match="no 200001 bytes"):
            Kernel(SOURCE, "first", DEVICE, LIMIT + 1)
    Kernel(SOURCE, "first", DEVICE, LIMIT)
    assert asked == [("first", LIMIT)]
