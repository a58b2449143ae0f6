"""Every kernel compiles for every architecture we ship to, on a machine without a GPU."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed")

from flashrt_ros.ops.cuda import compiler, gemm, prefix_attention, registers
from flashrt_ros.ops.cuda.capsule import SOURCE as CAPSULE
from flashrt_ros.ops.cuda.compiler import KernelSource, cache_key, compile_source, compiled, full_text, kernel_folder
from flashrt_ros.ops.cuda.cubin import registers_of
from flashrt_ros.ops.cuda.errors import KernelError
from flashrt_ros.ops.cuda.expert import kernel_sizes, registers_to_hand_over
from flashrt_ros.ops.cuda.gemm import product_source
from flashrt_ros.ops.cuda.image_attention import image_attention_source, wgmma_source
from flashrt_ros.ops.cuda.prefix_attention import prefix_attention_source
from flashrt_ros.ops.cuda.registers import demand_registers


def expert_source(
    rows: int, capacity: int, clusters: int, bits: tuple[int, int, int, int] = (16, 16, 16, 16), **more: int
) -> KernelSource:
    """As ExpertKernel asks for it on a GPU with 227 KB of shared memory a block."""
    sizes = kernel_sizes(bits, rows, capacity, clusters, 232448)
    return KernelSource("expert", {**sizes, "LAYERS": 18, "RESIDENT": 1, "OVERLAP": 0, **more})


ARCHITECTURES = ("sm_90a", "sm_110a", "sm_120a")
PREFIX = {"WIDTH": 2048, "HEADS": 8, "HEAD_DIM": 256, "HIDDEN": 16384}
SOURCES = (
    KernelSource("norms", {"COLS": 1152, "ROW_WARPS": 3}),
    KernelSource("norms", {"COLS": 1024, "ROW_WARPS": 4, "OVERLAP": 1}),
    KernelSource("norms", {"COLS": 1152, "ROW_WARPS": 3, "QUANTISED": 1, "PARTS": 3, "OVERLAP": 1}),
    KernelSource("norms", {"COLS": 2048, "ROW_WARPS": 8, "QUANTISED": 1, "MULTIPLIED": 1, "PARTS": 5, "OVERLAP": 1}),
    KernelSource("norms", {"COLS": 2048, "ROW_WARPS": 8, "PARTS": 8}),
    KernelSource("quantise", {"OVERLAP": 1}),
    KernelSource("pixels", {"GRID": 16, "PATCH": 14, "LEADING": 592}),
    KernelSource("prefix", {**PREFIX, "WITH_QUERY": 1}),
    KernelSource("prefix", {**PREFIX, "WITH_QUERY": 0, "OVERLAP": 1}),
    expert_source(rows=10, capacity=712, clusters=15),
    expert_source(rows=50, capacity=968, clusters=15),
    expert_source(rows=10, capacity=712, clusters=15, RESIDENT=0, OVERLAP=1),
    expert_source(rows=30, capacity=712, clusters=12),
    expert_source(rows=1, capacity=712, clusters=3),
    expert_source(rows=1, capacity=712, clusters=15),
    expert_source(rows=9, capacity=712, clusters=15),
    expert_source(rows=10, capacity=712, clusters=15, bits=(8, 8, 8, 8)),
    expert_source(rows=10, capacity=712, clusters=15, bits=(4, 4, 4, 4)),
    expert_source(rows=50, capacity=968, clusters=15, bits=(8, 8, 8, 8)),
    expert_source(rows=50, capacity=968, clusters=15, bits=(4, 4, 4, 4), RESIDENT=0, OVERLAP=1),
    expert_source(rows=10, capacity=968, clusters=15, bits=(16, 8, 4, 4), RESIDENT=0, OVERLAP=1),
    expert_source(rows=30, capacity=712, clusters=15, bits=(16, 8, 4, 8), RESIDENT=0),
    expert_source(rows=60, capacity=960, clusters=15, bits=(4, 4, 8, 4)),
    expert_source(rows=1, capacity=712, clusters=3, bits=(4, 4, 8, 16)),
    expert_source(rows=10, capacity=712, clusters=7, bits=(8, 8, 8, 4)),
    expert_source(rows=10, capacity=712, clusters=2, bits=(16, 16, 8, 16)),
    expert_source(rows=16, capacity=712, clusters=16, bits=(4, 4, 4, 8)),
    CAPSULE,
    image_attention_source(256, 16, 72, {}),
    image_attention_source(256, 16, 72, {"QUANTISED": 1, "OVERLAP": 1}),
    image_attention_source(256, 16, 72, {"CLUSTER": 4, "OVERLAP": 1}),
    image_attention_source(64, 3, 24, {"QUANTISED": 1}),
    image_attention_source(192, 1, 120, {}),
)
HOPPER = (
    product_source({"TILE_ROWS": 240}),
    product_source({"TILE_ROWS": 240, "GEGLU": 1, "ROW_SCALE": 1, "OVERLAP": 1}),
    product_source({"TILE_ROWS": 248, "GEGLU": 1, "ROW_SCALE": 1}),
    product_source({"TILE_ROWS": 256, "GEGLU": 1}),
    product_source({"TILE_ROWS": 8, "GEGLU": 1}),
    product_source({"TILE_ROWS": 240, "GEGLU": 1, "FP8": 1, "OUT8": 1, "OVERLAP": 1}),
    product_source({"TILE_ROWS": 176, "GELU": 1, "FP8": 1, "OUT8": 1, "STAGES": 5, "OVERLAP": 1}),
    product_source({"TILE_ROWS": 104, "GELU": 1, "FP8": 1, "OUT8": 1, "STAGES": 5, "CONSUMERS": 3, "OVERLAP": 1}),
    product_source({"TILE_ROWS": 240, "GEGLU": 1, "FP8": 1, "OUT8": 1, "STAGES": 3, "CONSUMERS": 3, "OVERLAP": 1}),
    product_source({"TILE_ROWS": 240, "GEGLU": 1, "FP8": 1, "OUT8": 1, "CONSUMERS": 3, "CHUNKS": 3}),
    product_source({"TILE_ROWS": 240, "GEGLU": 1, "ROW_SCALE": 1, "STAGES": 3, "CONSUMERS": 3, "OVERLAP": 1}),
    product_source({"TILE_ROWS": 240, "FP8": 1, "STAGES": 3, "CONSUMERS": 3, "PARTS": 4, "OVERLAP": 1}),
    product_source({"TILE_ROWS": 240, "FP8": 1, "CONSUMERS": 3, "CHUNKS": 10}),
    product_source({"TILE_ROWS": 184, "CONSUMERS": 3}),
    product_source({"TILE_ROWS": 240, "GELU": 1, "FP8": 1, "OUT8": 1, "STAGES": 3, "CONSUMERS": 3}),
    product_source({"TILE_ROWS": 128, "FP8": 1, "STAGES": 6}),
    product_source({"TILE_ROWS": 184, "FP8": 1, "STAGES": 5, "OVERLAP": 1}),
    product_source({"TILE_ROWS": 64, "FP8": 1, "STAGES": 8}),
    product_source({"TILE_ROWS": 144, "GELU": 1}),
    product_source({"TILE_ROWS": 80, "STAGES": 7, "OVERLAP": 1}),
    product_source({"TILE_ROWS": 120, "FP8": 1, "STAGES": 6, "OVERLAP": 1}),
    product_source({"TILE_ROWS": 120, "FP8": 1, "STAGES": 6, "ROTARY": 1, "OVERLAP": 1}),
    product_source({"TILE_ROWS": 176, "FP8": 1, "ROTARY": 1}),
    product_source({"TILE_ROWS": 8, "ROTARY": 1}),
    product_source({"TILE_ROWS": 8, "FP8": 1, "STAGES": 8, "ROTARY": 1, "HEAD_CODES": 1}),
    product_source({"TILE_ROWS": 168, "FP8": 1, "ROTARY": 1, "HEAD_CODES": 1, "OVERLAP": 1}),
    product_source({"TILE_ROWS": 168, "FP8": 1, "ROTARY": 1, "HEAD_CODES": 1, "SHARE_X": 2, "SHARE_WEIGHTS": 2}),
    product_source({"TILE_ROWS": 120, "FP8": 1, "ROTARY": 1, "HEAD_CODES": 1, "SHARE_X": 2, "SHARE_WEIGHTS": 2}),
    product_source({"TILE_ROWS": 128, "FP8": 1, "STAGES": 6, "OVERLAP": 1, "SHARE_X": 4}),
    product_source({"TILE_ROWS": 192, "FP8": 1, "STAGES": 5, "OVERLAP": 1, "SHARE_X": 2, "SHARE_WEIGHTS": 2}),
    product_source({"TILE_ROWS": 64, "FP8": 1, "STAGES": 8, "OVERLAP": 1, "SHARE_WEIGHTS": 4}),
    product_source({"TILE_ROWS": 120, "FP8": 1, "STAGES": 6, "ROTARY": 1, "OVERLAP": 1, "SHARE_X": 4}),
    product_source({"TILE_ROWS": 120, "FP8": 1, "STAGES": 6, "ROTARY": 1, "SHARE_X": 2, "SHARE_WEIGHTS": 3}),
    product_source({"TILE_ROWS": 176, "GELU": 1, "FP8": 1, "OUT8": 1, "STAGES": 5, "SHARE_X": 2, "SHARE_WEIGHTS": 3}),
)
HOPPER_ATTENTION = (
    prefix_attention_source({}),
    prefix_attention_source({"OUT8": 1, "OVERLAP": 1}),
    prefix_attention_source({"FP8": 1}),
    prefix_attention_source({"FP8": 1, "OUT8": 1, "OVERLAP": 1}),
)
HOPPER_IMAGES = (
    wgmma_source(256, 16, 72, {}),
    wgmma_source(256, 16, 72, {"QUANTISED": 1, "OVERLAP": 1}),
    wgmma_source(256, 16, 72, {"CLUSTER": 4, "OVERLAP": 1}),
    wgmma_source(256, 16, 72, {"KEY_LINE": 64}),
    wgmma_source(256, 16, 72, {"VALUE_LINE": 128}),
    wgmma_source(256, 16, 72, {"WARPGROUPS": 1}),
    *(wgmma_source(tokens, 3, dim, {"QUANTISED": 1}) for tokens in range(64, 257, 64) for dim in (24, 40, 56, 72)),
    *(wgmma_source(tokens, 1, dim, {}) for tokens in range(64, 257, 64) for dim in (88, 104, 120)),
)

FP4 = (
    KernelSource("fp4", {"K": 2048}),
    KernelSource("fp4", {"K": 16384, "OVERLAP": 1}),
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHRT_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_it_compiles(source: KernelSource, architecture: str) -> None:
    assert compile_source(source, architecture).startswith(b"\x7fELF")


@pytest.mark.parametrize("source", HOPPER_ATTENTION, ids=str)
def test_prefix_attention_compiles_for_hopper(source: KernelSource) -> None:
    assert compile_source(source, "sm_90a").startswith(b"\x7fELF")


def assembler_report(source: KernelSource) -> str:
    """What the assembler says of registers and of products when it compiles for Hopper."""
    from cuda.bindings import nvrtc

    _, program = nvrtc.nvrtcCreateProgram(full_text(source).encode(), b"reported.cu", 0, [], [])
    options = [*compiler.options_of(source, "sm_90a"), "--ptxas-options=-v"]
    nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = b" " * size
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(program)
    return str(log.decode(errors="replace"))


@pytest.mark.parametrize("source", HOPPER_IMAGES, ids=str)
def test_image_attention_compiles_for_hopper_and_has_registers_enough(source: KernelSource) -> None:
    """Also for the second block of a multiprocessor, where there is memory for one."""
    report = assembler_report(source)
    assert "0 bytes spill stores, 0 bytes spill loads" in report
    assert "serialized" not in report
    registers, threads = registers_of(compiled(source, "sm_90a")), 128 * source.defines["WARPGROUPS"]
    assert registers is not None
    assert threads * registers * (2 if source.defines["HEAD_DIM"] <= 72 else 1) <= 65536


@pytest.mark.parametrize("architecture", ARCHITECTURES[1:])
def test_image_attention_of_warpgroups_says_that_it_is_for_hopper(architecture: str) -> None:
    with pytest.raises(KernelError, match="image_attention_wgmma.cu is written for sm_90a"):
        compile_source(HOPPER_IMAGES[0], architecture)


@pytest.mark.parametrize("source", HOPPER_ATTENTION, ids=str)
def test_prefix_attention_has_registers_enough(source: KernelSource) -> None:
    """Otherwise the assembler lets each product wait for the one before it, silently."""
    report = assembler_report(source)
    assert "0 bytes spill stores, 0 bytes spill loads" in report
    assert "serialized" not in report


@pytest.mark.parametrize("bits", [16, 8])
def test_the_experts_products_of_four_warps_do_not_wait_for_each_other(bits: int) -> None:
    source = expert_source(rows=50, capacity=968, clusters=15, bits=(bits, bits, bits, bits))
    assert "serialized" not in assembler_report(source)


@pytest.mark.parametrize("resident", [0, 1])
@pytest.mark.parametrize("rows", [1, 10, 16, 32])
def test_the_registers_that_the_experts_warps_hand_over_are_there(rows: int, resident: int) -> None:
    """Warps that ask for more wait for ever unless the launch gives each thread 128."""
    source = expert_source(rows=rows, capacity=712, clusters=15, RESIDENT=resident)
    assert registers_of(compiled(source, "sm_90a")) == registers_to_hand_over("sm_90a", rows) == 128


def test_a_compiler_that_gives_warps_too_few_registers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    source = expert_source(rows=10, capacity=712, clusters=15)
    demand_registers(source, "sm_90a", 128)
    cubin = compiled(source, "sm_90a")
    at = cubin.index(struct.pack("<BBH", 4, 0x2F, 8)) + 8  # behind attribute and symbol
    fewer = cubin[:at] + struct.pack("<I", 120) + cubin[at + 4 :]
    monkeypatch.setattr(registers, "compiled", lambda *_: fewer)
    demand_registers.cache_clear()
    with pytest.raises(KernelError, match=r"^expert: NVRTC \d+\.\d+ gives each thread 120 registers, .* on 128"):
        demand_registers(source, "sm_90a", 128)


def test_the_expert_hands_registers_over_only_where_few_warps_multiply_on_hopper() -> None:
    assert registers_to_hand_over("sm_120a", 10) is None
    assert registers_to_hand_over("sm_90a", 50) is None


@pytest.mark.parametrize("cubin", [b"", b"\x7fELF\x01\x01" + bytes(100), bytes(64)])
def test_a_file_that_is_no_cubin_says_nothing_of_registers(cubin: bytes) -> None:
    assert registers_of(cubin) is None


@pytest.mark.parametrize("resident", [0, 1])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_the_expert_keeps_ten_rows_in_registers(bits: int, resident: int) -> None:
    source = expert_source(rows=10, capacity=712, clusters=15, bits=(bits, bits, bits, bits), RESIDENT=resident)
    assert "0 bytes spill stores, 0 bytes spill loads" in assembler_report(source)


@pytest.mark.parametrize("clusters", [3, 15, 16])
def test_the_host_lays_out_the_experts_memory_as_the_kernel_does(
    clusters: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for header in kernel_folder().glob("*.cuh"):
        (tmp_path / header.name).write_bytes(header.read_bytes())
    (tmp_path / "layout.cu").write_text(
        '#include "expert_plan.cuh"\n'
        'static_assert(SHARED_BYTES - sizeof(Shared) < 1400, "no more than alignment and barriers are rounded to");\n'
        'extern "C" __global__ void nothing() {}\n'
    )
    monkeypatch.setattr(compiler, "kernel_folder", lambda: tmp_path)
    compiled_any = 0
    for rows in range(1, 65):
        for capacity in (8, 712, 1024 - rows):
            try:
                sizes = kernel_sizes((16, 8, 4, 8), rows, capacity, clusters, 232448)
            except KernelError:
                continue  # more than a block has room for
            source = KernelSource("layout", {**sizes, "LAYERS": 18, "RESIDENT": 1, "OVERLAP": 0})
            assert compile_source(source, "sm_90a").startswith(b"\x7fELF")
            compiled_any += 1
    assert compiled_any >= 40


@pytest.mark.parametrize("architecture", ARCHITECTURES[1:])
def test_prefix_attention_says_that_it_is_for_hopper(architecture: str) -> None:
    with pytest.raises(KernelError, match="prefix_attention.cu is written for sm_90a"):
        compile_source(HOPPER_ATTENTION[0], architecture)


@pytest.mark.parametrize("source", HOPPER, ids=str)
def test_the_matrix_product_compiles_for_hopper(source: KernelSource) -> None:
    assert compile_source(source, "sm_90a").startswith(b"\x7fELF")


@pytest.mark.parametrize("source", HOPPER, ids=str)
def test_the_matrix_product_has_registers_enough(source: KernelSource) -> None:
    """Otherwise the assembler lets each product wait for the one before it, silently."""
    report = assembler_report(source)
    assert "0 bytes spill stores, 0 bytes spill loads" in report
    assert "serialized" not in report


@pytest.mark.parametrize("architecture", ARCHITECTURES[1:])
def test_the_matrix_product_says_that_it_is_for_hopper(architecture: str) -> None:
    with pytest.raises(KernelError, match="gemm.cu is written for sm_90a"):
        compile_source(HOPPER[0], architecture)


@pytest.mark.parametrize("source", HOPPER, ids=str)
def test_the_registers_that_consumers_take_over_are_there(source: KernelSource) -> None:
    """They wait for ever for more. Where low tiles hand over nothing, a LayerNorm's block has to fit beside theirs."""
    registers, demanded = registers_of(compiled(source, "sm_90a")), gemm.handed_over(source)
    assert registers is not None
    if demanded is not None:
        assert registers == demanded
    elif source.defines["TILE_ROWS"] <= 128:
        assert 384 * registers + 128 * 160 <= 65536


@pytest.mark.parametrize("source", HOPPER_ATTENTION, ids=str)
def test_the_registers_that_consumers_of_attention_take_over_are_there(source: KernelSource) -> None:
    assert registers_of(compiled(source, "sm_90a")) == prefix_attention.REGISTERS


@pytest.mark.parametrize("also", ["GEGLU", "GELU", "OUT8", "ROW_SCALE"])
def test_nothing_else_goes_behind_a_product_that_is_rotated(also: str) -> None:
    with pytest.raises(KernelError, match="goes with ROTARY"):
        compile_source(product_source({"TILE_ROWS": 64, "ROTARY": 1, also: 1}), "sm_90a")


@pytest.mark.parametrize("tile", [12, 264])
def test_a_tile_that_the_instruction_does_not_have_is_refused(tile: int) -> None:
    with pytest.raises(KernelError, match="does not compile for sm_90a"):
        compile_source(product_source({"TILE_ROWS": tile}), "sm_90a")


def test_every_source_file_is_in_the_list() -> None:
    listed = {source.name for source in (*SOURCES, *HOPPER, *HOPPER_ATTENTION, *HOPPER_IMAGES, *FP4)}
    assert {path.stem for path in kernel_folder().glob("*.cu")} == listed


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
