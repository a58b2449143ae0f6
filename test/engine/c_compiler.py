"""The system's C and C++ compilers, for the tests of the C interface."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from test.sources import ROOT

INCLUDE = ROOT / "include"
HEADER = INCLUDE / "flashrt_contract.h"
COMPILERS = {"c11": "cc", "c17": "cc", "c++11": "c++", "c++17": "c++"}
STRICT = ("-Wall", "-Wextra", "-Wpedantic", "-Werror")


def compile_to(target: Path, *sources: Path, standard: str = "c11", flags: tuple[str, ...] = ()) -> Path:
    """Compile C `sources` by `standard`, without one warning, to `target`; the test fails if that can't be done."""
    compiler = shutil.which(COMPILERS[standard])
    if compiler is None:
        pytest.fail(f"there is no `{COMPILERS[standard]}` on PATH; install a C and C++ compiler (build-essential)")
    language = "c++" if "+" in standard else "c"
    options = ["-x", language, f"-std={standard}", *STRICT, "-O1", f"-I{INCLUDE}", *flags]
    command = [compiler, *options, *map(str, sources), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.fail(f"{compiler} -std={standard} refused {', '.join(s.name for s in sources)}:\n{done.stderr}")
    return target


def compile_library(folder: Path, source: Path, standard: str) -> Path:
    """A shared library made of `source`."""
    flags = ("-shared", "-fPIC", "-pthread")
    return compile_to(folder / f"{source.stem}_{standard}.so", source, standard=standard, flags=flags)


def run_program(folder: Path, text: str, standard: str = "c11") -> str:
    """What the C program `text` prints."""
    source = folder / "program.c"
    source.write_text(text)
    program = compile_to(folder / "program", source, standard=standard)
    return subprocess.run([program], capture_output=True, text=True, timeout=60, check=True).stdout
