"""Norms on Hopper: what a row waits for, read from the machine code."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed")

from flashrt_ros.ops.cuda.compiler import KernelSource, compile_source
from flashrt_ros.ops.cuda.rows import row_warps
from test.kernels.test_compile import assembler_report
from test.kernels.test_fp4 import disassembled

# As the tiers ask for them: vision's norms with what their product was cut into, and the prefix's.
NORMS = [("layer_norm", 1152, 1, 0), ("layer_norm", 1152, 3, 0), ("residual_rms_norm", 2048, 1, 1),
         ("residual_rms_norm", 2048, 4, 1)]  # fmt: skip
WAIT = "ACQBULK"  # griddepcontrol.wait


def source_of(width: int, parts: int, multiplied: int) -> KernelSource:
    sizes = {"COLS": width, "ROW_WARPS": row_warps(width), "QUANTISED": 1, "MULTIPLIED": multiplied, "PARTS": parts}
    return KernelSource("norms", {**sizes, "OVERLAP": 1})


@pytest.mark.parametrize(("function", "width", "parts", "multiplied"), NORMS)
def test_a_row_is_asked_for_in_one_go_right_behind_the_wait(
    function: str, width: int, parts: int, multiplied: int, tmp_path: Path
) -> None:
    """Nothing in front of the wait needs what is loaded there; behind it nothing is added before all is asked for."""
    text = disassembled(compile_source(source_of(width, parts, multiplied), "sm_90a"), tmp_path)
    lines = text[text.index(f".text.{function}:") :].splitlines()
    operations = [line.split("*/")[1] for line in lines if "*/" in line]
    before = list(takewhile(lambda line: WAIT not in line, operations))
    assert len(before) < len(operations)
    assert not [line for line in before if "MUFU" in line or "FADD" in line or "FMUL" in line]
    behind = takewhile(lambda line: "FADD" not in line, operations[len(before) :])
    groups = width // (4 * 32 * row_warps(width))
    assert len([line for line in behind if "LDG" in line]) >= (parts + 1) * groups


@pytest.mark.parametrize(("function", "width", "parts", "multiplied"), NORMS)
def test_norms_keep_all_in_registers(function: str, width: int, parts: int, multiplied: int) -> None:
    report = assembler_report(source_of(width, parts, multiplied))
    (found,) = (part for part in report.split("Compiling entry function ") if part.startswith(f"'{function}'"))
    assert "0 bytes spill stores, 0 bytes spill loads" in found
