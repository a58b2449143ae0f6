"""The layout of the C interface, three times over: as a compiler sees the header, as ctypes sees the mirror, and as the
committed table of its version says.

The lines of a committed table never change. A field at the end of flashrt_contract, or a new number, adds a line to
it; every other change is a new ABI version: raise it in the header and in flashrt_ros/engine/cabi.py, and commit what
`python -m test.engine.c_layout` prints as abi_<version>.json.
"""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashrt_ros.engine import cabi

from .c_compiler import HEADER, run_program

STRUCTURES: Mapping[str, type[ctypes.Structure]] = {
    "flashrt_buffer": cabi.BufferView,
    "flashrt_stage": cabi.StageView,
    "flashrt_region": cabi.RegionView,
    "flashrt_contract": cabi.ContractView,
}
C_TYPES: Mapping[Any, str] = {
    ctypes.c_uint32: "uint32_t",
    ctypes.c_uint64: "uint64_t",
    ctypes.c_void_p: "void *",
    ctypes.POINTER(ctypes.c_char): "char *",
    ctypes.POINTER(ctypes.c_int32): "flashrt_status *",
    ctypes.POINTER(ctypes.c_uint64): "uint64_t *",
    ctypes.POINTER(ctypes.c_void_p): "void **",
}
_FIELD = re.compile(r"(?<=\(\*)\w+(?=\)\()|\w+$")  # of a function pointer, or of anything else
PROGRAM = """#include "flashrt_contract.h"
#include <stdio.h>

int main(void)
{
%s    return 0;
}
"""
ASSIGNMENTS = """#include "flashrt_contract.h"

%s
void assign(flashrt_contract *contract);
void assign(flashrt_contract *contract)
{
%s
}
"""
Layout = dict[str, dict[str, int]]


def table(version: int = cabi.ABI_VERSION) -> Layout:
    """What was committed for `version`."""
    layout: Layout = json.loads(Path(__file__).with_name(f"abi_{version}.json").read_text())
    return layout


def of_python() -> Layout:
    """Sizes and offsets of the ctypes structures, and the numbers that `cabi` knows."""
    return {
        "constants": dict(sorted(python_constants().items())),
        **{name: _python_structure(structure) for name, structure in STRUCTURES.items()},
    }


def _python_structure(structure: type[ctypes.Structure]) -> dict[str, int]:
    offsets = {name: getattr(structure, name).offset for name, *_ in structure._fields_}
    return {"sizeof": ctypes.sizeof(structure), **offsets}


def python_constants() -> dict[str, int]:
    """Every numbered constant under its name in C."""
    return {
        "FLASHRT_ABI_VERSION": cabi.ABI_VERSION,
        **{f"FLASHRT_{status.name}": status.value for status in cabi.Status},
        **{f"FLASHRT_DEVICE_{name.upper()}": code for name, code in cabi.DEVICE_CODES.items()},
        **{f"FLASHRT_ROLE_{role.name}": code for role, code in cabi.ROLE_CODES.items()},
        **{f"FLASHRT_RATE_{rate.name}": code for rate, code in cabi.RATE_CODES.items()},
        **{f"FLASHRT_DTYPE_{dtype.name}": code for dtype, code in cabi.DTYPE_CODES.items()},
    }


def _code() -> str:
    return re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)


def header_constants() -> list[str]:
    """Names of the numbered constants that the header defines."""
    return [*re.findall(r"\b(FLASHRT_\w+) = ", _code()), "FLASHRT_ABI_VERSION"]


def header_fields(structure: str) -> list[str]:
    """Names of the fields that the header gives `structure`, in order."""
    body = re.search(rf"typedef struct {structure} \{{(.*?)\n\}} {structure};", _code(), flags=re.DOTALL)
    assert body is not None
    declarations = body[1].split(";")[:-1]
    return [_FIELD.findall(declaration)[0] for declaration in declarations]


def of_c(folder: Path, standard: str = "c11") -> Layout:
    """The same as `of_python`, printed by a C program that includes the header."""
    expressions = {("constants", name): name for name in sorted(header_constants())}
    for structure in STRUCTURES:
        expressions[structure, "sizeof"] = f"sizeof({structure})"
        for field in header_fields(structure):
            expressions[structure, field] = f"offsetof({structure}, {field})"
    lines = [f'    printf("%lu\\n", (unsigned long)({expression}));\n' for expression in expressions.values()]
    printed = run_program(folder, PROGRAM % "".join(lines), standard).split()
    layout: Layout = {}
    for (group, name), value in zip(expressions, printed, strict=True):
        layout.setdefault(group, {})[name] = int(value)
    return layout


def signatures() -> str:
    """C code that compiles without a warning only if every callback has the arguments that `cabi` gives it."""
    functions, assignments = [], []
    for name, kind in cabi.CALLBACKS.items():
        arguments = ", ".join(map(C_TYPES.__getitem__, kind._argtypes_))
        functions.append(f"void {name}_here({arguments});")
        assignments.append(f"    contract->{name} = {name}_here;")
    return ASSIGNMENTS % ("\n".join(functions), "\n".join(assignments))


if __name__ == "__main__":
    print(json.dumps(of_python(), indent=2))
