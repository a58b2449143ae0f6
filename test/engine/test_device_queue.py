"""What is handed to the driver arrives there whole, and nobody waits for what is known to be done.

A machine without a GPU has no driver, so a library in C stands in for it, which notes down what it was given.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from flashrt_ros.engine import DriverError, device_queue, driver
from flashrt_ros.engine.device_queue import NOWHERE, DeviceQueue
from flashrt_ros.engine.driver import Driver

from .c_compiler import compile_library

GPU = torch.device("cuda", 0)
STAND_IN = """
#include <stddef.h>
#include <stdint.h>
uint64_t seen[16];
int result;
static int note(int count, const uint64_t *values) {
  for (int i = 0; i < count; ++i) seen[i] = values[i];
  return result;
}
#define GIVEN(...) note(sizeof((uint64_t[]){__VA_ARGS__}) / 8, (uint64_t[]){__VA_ARGS__})
#define P(x) (uint64_t)(uintptr_t)(x)
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t n, void *s) { return GIVEN(to, P(from), n, P(s)); }
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t n, void *s) { return GIVEN(P(to), from, n, P(s)); }
int cuEventRecord(void *event, void *s) { return GIVEN(P(event), P(s)); }
int cuStreamSynchronize(void *s) { return GIVEN(P(s)); }
int cuLaunchKernelEx(const void *config, void *f, void **p, void **x) {
  return GIVEN(P(config), P(f), P(p), P(x));
}
int cuGetErrorName(int code, const char **text) {
  *text = code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : NULL;
  return code == 700 ? 0 : 1;
}
"""
FAR = 0x7FFF_FFFF_F001  # needs more than 32 bits


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("driver")
    source = folder / "stand_in.c"
    source.write_text(STAND_IN)
    return ctypes.CDLL(str(compile_library(folder, source, "c11")))


def seen(library: ctypes.CDLL, count: int) -> list[int]:
    return list((ctypes.c_uint64 * 16).in_dll(library, "seen"))[:count]


def fail_with(library: ctypes.CDLL, result: int) -> None:
    ctypes.c_int.in_dll(library, "result").value = result


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The handle of the current stream, which a test may change."""
    current = [FAR + 9]
    monkeypatch.setattr(device_queue, "current_stream", lambda index: current[0])
    return current


@pytest.fixture
def queue(library: ctypes.CDLL, stream: list[int], monkeypatch: pytest.MonkeyPatch) -> DeviceQueue:
    found = Driver(library)
    monkeypatch.setattr(device_queue, "driver", lambda: found)
    fail_with(library, 0)
    return DeviceQueue(GPU)


def test_every_argument_arrives_whole(library: ctypes.CDLL, queue: DeviceQueue) -> None:
    queue.upload(FAR, FAR + 1, 2**33)
    assert seen(library, 4) == [FAR, FAR + 1, 2**33, FAR + 9]
    queue.download(FAR + 1, FAR, 2**33)
    assert seen(library, 4) == [FAR + 1, FAR, 2**33, FAR + 9]
    queue.mark(FAR + 2)
    assert seen(library, 2) == [FAR + 2, FAR + 9]
    queue.finish()
    assert seen(library, 1) == [FAR + 9]
    addresses = [ctypes.byref(ctypes.c_byte.from_address(FAR + i)) for i in range(3)]
    assert Driver(library).launch(*addresses, None) == 0
    assert seen(library, 4) == [FAR, FAR + 1, FAR + 2, 0]


def test_what_was_enqueued_before_a_finish_is_done_and_what_came_behind_is_not(queue: DeviceQueue) -> None:
    assert queue.is_done(NOWHERE)
    before = queue.mark(1)
    assert not queue.is_done(before)
    queue.finish()
    behind = queue.mark(1)
    assert queue.is_done(before)
    assert not queue.is_done(behind)


def test_a_finish_says_nothing_of_another_stream(queue: DeviceQueue, stream: list[int]) -> None:
    here = queue.mark(1)
    stream[0] += 1
    there = queue.mark(1)
    queue.finish()
    assert queue.is_done(there)
    assert not queue.is_done(here)


def test_a_call_that_fails_is_repeated_once_with_the_context_current(
    library: ctypes.CDLL, queue: DeviceQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_current = []

    def synchronize() -> None:
        made_current.append(True)
        fail_with(library, 0)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.inference_mode())  # any context manager
    fail_with(library, 201)
    queue.upload(1, 2, 3)
    assert made_current == [True]


@pytest.mark.parametrize(("result", "name"), [(700, "CUDA_ERROR_ILLEGAL_ADDRESS"), (999999, "CUresult 999999")])
def test_a_refusal_is_named(
    library: ctypes.CDLL, queue: DeviceQueue, monkeypatch: pytest.MonkeyPatch, result: int, name: str
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.inference_mode())
    fail_with(library, result)
    with pytest.raises(DriverError, match=rf"the driver refuses a download on 'cuda:0' \({name}\)"):
        queue.download(1, 2, 3)


@pytest.mark.parametrize("present", [False, True])
def test_a_machine_without_a_usable_driver_is_told_so(
    present: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    empty = tmp_path / "empty.c"
    empty.write_text("extern int nothing;\n")
    name = str(compile_library(tmp_path, empty, "c11")) if present else "libnone.so.1"
    monkeypatch.setattr(driver, "LIBRARY", name)
    driver.driver.cache_clear()
    with pytest.raises(DriverError, match=r"cannot be used .*; install an NVIDIA driver"):
        driver.driver()
