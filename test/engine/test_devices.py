"""A device that cannot be used is refused in one line that says what is wrong and what to do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from flashrt_ros.engine import DeviceError, devices, memory_refusals, require_memory, resolve_device
from flashrt_ros.engine.devices import CudaFacts, driver_version, free_bytes, unusable

GPU = torch.device("cuda", 0)
GIB = 1 << 30


@pytest.mark.parametrize(
    ("index", "facts", "reason"),
    [
        (0, CudaFacts(None, (13, 0), 0, None), "built without CUDA; install a CUDA build of torch"),
        (0, CudaFacts("13.0", None, 0, None), "no NVIDIA driver"),
        (0, CudaFacts("13.0", (12, 8), 0, None), r"driver is too old: it supports CUDA 12\.8, .* needs 13\.0"),
        (0, CudaFacts("13.0", (13, 0), 0, None), r"torch sees 0 GPU\(s\)"),
        (2, CudaFacts("13.0", (13, 0), 2, None), r"torch sees 2 GPU\(s\)"),
        (0, CudaFacts("12.6", (12, 8), 1, (7, 5)), r"too old: compute capability 7\.5, expected 8\.7 or above"),
        (0, CudaFacts("12.6", (12, 8), 1, (8, 6)), r"too old: compute capability 8\.6"),
    ],
)
def test_what_rules_a_gpu_out(index: int, facts: CudaFacts, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "cuda_facts", lambda asked: facts)
    with pytest.raises(DeviceError, match=reason) as caught:
        resolve_device(f"cuda:{index}")
    assert str(caught.value).startswith(f"device 'cuda:{index}' was asked for, but ")
    assert str(caught.value).endswith(", or set device to 'cpu'")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "facts",
    [
        CudaFacts("13.0", (13, 0), 1, (9, 0)),
        CudaFacts("13.2", (13, 0), 1, (11, 0)),  # an older driver of the same major version serves
        CudaFacts("12.6", (13, 1), 1, (8, 7)),
    ],
)
def test_what_serves(facts: CudaFacts) -> None:
    assert unusable(0, facts) == ""


def test_the_driver_of_this_machine_is_asked() -> None:
    found = driver_version()
    assert found is None or found >= (11, 0)


def test_too_little_memory_is_refused_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * GIB, 8 * GIB))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=8 * GIB, is_integrated=0)
    )
    require_memory(GPU, 3 * GIB, "it")
    with pytest.raises(DeviceError, match=r"policy 'x' takes about 9\.5 GiB on 'cuda:0', which has 3\.0 GiB free of 8"):
        require_memory(GPU, 9 * GIB + GIB // 2, "policy 'x'")
    require_memory(torch.device("cpu"), 1 << 60, "it")


def test_on_a_shared_memory_the_file_cache_counts_as_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    info = tmp_path_factory.mktemp("proc") / "meminfo"
    info.write_text("MemTotal: 16777216 kB\nMemFree: 1048576 kB\nMemAvailable: 8388608 kB\n")
    monkeypatch.setattr(devices, "_MEMORY_INFO", info)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, 16 * GIB))
    monkeypatch.setattr(devices, "is_integrated", lambda device: True)
    assert free_bytes(GPU) == 8 * GIB
    monkeypatch.setattr(devices, "is_integrated", lambda device: False)
    assert free_bytes(GPU) == GIB


def test_running_out_of_memory_later_is_one_line_too() -> None:
    text = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8 GiB.\nSee documentation"
    refused = pytest.raises(DeviceError, match=r"'cuda:0' ran out of memory \(CUDA out of memory\); end other")
    with refused as caught, memory_refusals(GPU):
        raise torch.OutOfMemoryError(text)
    assert "\n" not in str(caught.value)
