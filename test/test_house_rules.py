"""Size limits that keep every file readable in one sitting."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from test.sources import ROOT

LONGEST_FILE = 400
LONGEST_KERNEL_FILE = 900  # one resident kernel is one body, and splitting it would hide its phases
LONGEST_FUNCTION = 60
MEDIAN_FUNCTION = 8
FOLDERS = ("benchmarks", "bin", "flashrt_ros", "include", "kernels", "launch", "scripts", "test")
SOURCES = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".cu", ".cuh", ".c", ".h", ".sh") and "__pycache__" not in path.parts
)


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Name and lines of each function of a Python file, nested ones too; docstrings don't count."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, lines(node)


def lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    whole = node.end_lineno - node.lineno + 1
    if ast.get_docstring(node, clean=False) is None:
        return whole
    docstring = node.body[0]
    assert docstring.end_lineno is not None
    return whole - (docstring.end_lineno - docstring.lineno + 1)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_no_file_is_too_long(path: Path) -> None:
    longest = LONGEST_KERNEL_FILE if path.suffix in (".cu", ".cuh") else LONGEST_FILE
    assert len(path.read_text().splitlines()) <= longest


@pytest.mark.parametrize("path", [path for path in SOURCES if path.suffix == ".py"], ids=relative)
def test_no_function_is_too_long(path: Path) -> None:
    assert not {name: count for name, count in functions(path) if count > LONGEST_FUNCTION}


def test_functions_are_short_on_the_whole() -> None:
    package = [path for path in SOURCES if path.suffix == ".py" and "flashrt_ros" in path.parts]
    assert median(count for path in package for _, count in functions(path)) <= MEDIAN_FUNCTION
