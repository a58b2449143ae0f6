"""The block-scaled FP4 product: no GPU that has it is at hand, so its machine code is looked at instead."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed")

from flashrt_ros.ops.cuda.compiler import KernelSource, compile_source
from flashrt_ros.ops.cuda.errors import KernelError
from test.kernels.test_compile import FP4

# The disassembler's names: mma.sync and tcgen05.mma of kind mxf4nvf4, both with four scales a row and K = 64.
INSTRUCTION = {"sm_120a": "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X", "sm_110a": "UTCOMMA.4X"}


def disassembled(code: bytes, folder: Path) -> str:
    """What nvdisasm, from its wheel, makes of machine code."""
    program = Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13" / "bin" / "nvdisasm"
    file = folder / "kernel.cubin"
    file.write_bytes(code)
    result = subprocess.run([program, file], capture_output=True, text=True, check=True)
    return result.stdout


@pytest.mark.parametrize("source", FP4, ids=str)
@pytest.mark.parametrize("architecture", INSTRUCTION)
def test_the_machine_code_has_the_block_scaled_instruction(
    source: KernelSource, architecture: str, tmp_path: Path
) -> None:
    text = disassembled(compile_source(source, architecture), tmp_path)
    other = INSTRUCTION["sm_110a" if architecture == "sm_120a" else "sm_120a"]
    assert INSTRUCTION[architecture] in text
    assert other not in text
    assert "HMMA" not in text  # nothing was widened to 16 bits on the way


def test_hopper_does_not_have_it_and_the_source_says_so() -> None:
    with pytest.raises(KernelError, match="fp4.cu is written for sm_110a and sm_120a"):
        compile_source(FP4[0], "sm_90a")


@pytest.mark.parametrize("inputs", [4304, 32])
def test_inputs_that_are_no_whole_instructions_are_refused(inputs: int) -> None:
    with pytest.raises(KernelError, match="K must be a multiple of 64"):
        compile_source(KernelSource("fp4", {"K": inputs}), "sm_120a")
