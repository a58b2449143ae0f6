"""Every kernel compiles for every architecture we ship to, on a machine without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed")

from flashrt_ros.ops.cuda import compiler
from flashrt_ros.ops.cuda.compiler import KernelSource, cache_key, compile_source, compiled, full_text, kernel_folder
from flashrt_ros.ops.cuda.errors import KernelError

ARCHITECTURES = ("sm_90a", "sm_110a", "sm_120a")
PREFIX = {"WIDTH": 2048, "HEADS": 8, "HEAD_DIM": 256, "HIDDEN": 16384}
SOURCES = (
    KernelSource("norms", {"COLS": 1152}),
    KernelSource("norms", {"COLS": 1024, "OVERLAP": 1}),
    KernelSource("pixels", {"GRID": 16, "PATCH": 14, "LEADING": 592}),
    KernelSource("prefix", {**PREFIX, "WITH_QUERY": 1}),
    KernelSource("prefix", {**PREFIX, "WITH_QUERY": 0, "OVERLAP": 1}),
    KernelSource("expert", {"ROWS": 10, "STAGES": 9, "LAYERS": 18, "BLOCKS": 128}),
    KernelSource("expert", {"ROWS": 50, "STAGES": 8, "LAYERS": 18, "BLOCKS": 128, "OVERLAP": 1}),
    KernelSource("expert", {"ROWS": 30, "STAGES": 9, "LAYERS": 18, "BLOCKS": 20}),
    KernelSource("capsule"),
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHRT_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_it_compiles(source: KernelSource, architecture: str) -> None:
    assert compile_source(source, architecture).startswith(b"\x7fELF")


def test_every_source_file_is_in_the_list() -> None:
    assert {path.stem for path in kernel_folder().glob("*.cu")} == {source.name for source in SOURCES}


def test_a_compiler_error_is_in_the_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.cu").write_text("this is no kernel")
    monkeypatch.setattr(compiler, "kernel_folder", lambda: tmp_path)
    with pytest.raises(KernelError, match=r"broken\.cu does not compile for sm_90a.*\n.*error"):
        compile_source(KernelSource("broken"), "sm_90a")


def test_a_missing_source_names_the_folder() -> None:
    with pytest.raises(KernelError, match=r"'nothing\.cu' is missing in .*kernels"):
        full_text(KernelSource("nothing"))


def test_the_second_time_comes_from_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = SOURCES[0]
    first = compiled(source, "sm_90a")
    monkeypatch.setattr(compiler, "compile_source", lambda *_: pytest.fail("compiled again"))
    assert compiled(source, "sm_90a") == first
    assert [path.suffix for path in cache.iterdir()] == [".cubin"]


def test_the_key_depends_on_sizes_architecture_and_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = SOURCES[0]
    keys = {cache_key(source, "sm_90a"), cache_key(source, "sm_120a"), cache_key(SOURCES[1], "sm_90a")}
    for file in kernel_folder().iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    header = tmp_path / "common.cuh"
    header.write_text(header.read_text() + "\n// changed\n")
    monkeypatch.setattr(compiler, "kernel_folder", lambda: tmp_path)
    keys.add(cache_key(source, "sm_90a"))
    assert len(keys) == 4


def test_without_nvrtc_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings", None)
    with pytest.raises(KernelError, match="NVRTC cannot be loaded.*pip install"):
        compiler.compiler_version()
