"""The caches that timed starts begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashrt_ros.measure.pi05.starts import caches_in
from flashrt_ros.ops.cuda.compiler import cache_folder


def test_a_start_knows_nothing_that_another_process_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVRTC keeps its results in the driver's cache: with our own alone, an 8-bit start took 4.0 instead of 11.2 s."""
    caches = caches_in(str(tmp_path))
    assert set(caches) == {"FLASHRT_CACHE", "CUDA_CACHE_PATH"}
    assert len(set(caches.values())) == 2  # none finds the other's files
    for name, folder in caches.items():
        assert Path(folder).parent == tmp_path
        monkeypatch.setenv(name, folder)
    assert cache_folder() == Path(caches["FLASHRT_CACHE"])
