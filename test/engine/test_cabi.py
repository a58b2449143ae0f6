"""The header, its mirror in Python and the table of the version agree on every byte and every number."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashrt_ros.contract import DType, Rate, Role
from flashrt_ros.engine import cabi

from . import c_layout
from .c_compiler import HEADER, compile_to


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> c_layout.Layout:
    """The layout that the C compiler gives the header."""
    return c_layout.of_c(tmp_path_factory.mktemp("layout"))


def test_the_compiler_and_ctypes_lay_the_structures_out_alike(compiled: c_layout.Layout) -> None:
    assert compiled == c_layout.of_python()


def test_the_layout_of_this_abi_version_has_not_changed(compiled: c_layout.Layout) -> None:
    assert compiled == c_layout.table()


def test_a_compiler_of_cpp_gives_the_same_layout(compiled: c_layout.Layout, tmp_path: Path) -> None:
    assert c_layout.of_c(tmp_path, "c++17") == compiled


@pytest.mark.parametrize("structure", c_layout.STRUCTURES)
def test_fields_come_in_the_same_order_and_leave_no_gap(structure: str) -> None:
    layout = c_layout.table()[structure]
    mirror = c_layout.STRUCTURES[structure]
    assert c_layout.header_fields(structure) == [name for name, *_ in mirror._fields_]
    sizes = [getattr(mirror, name).size for name, *_ in mirror._fields_]
    offsets = [layout[name] for name, *_ in mirror._fields_]
    assert offsets == [sum(sizes[:i]) for i in range(len(sizes))]
    assert layout["sizeof"] == sum(sizes)


def test_every_number_has_one_meaning_in_both_languages(compiled: c_layout.Layout) -> None:
    assert compiled["constants"] == c_layout.python_constants()
    statuses = [status.value for status in cabi.Status]
    assert statuses == list(range(len(statuses)))


def test_everything_that_a_contract_can_contain_has_a_number() -> None:
    assert cabi.ROLE_CODES.keys() == set(Role)
    assert cabi.RATE_CODES.keys() == set(Rate)
    assert cabi.DTYPE_CODES.keys() == set(DType)


def test_the_capsule_has_the_name_that_the_header_says() -> None:
    assert f'#define FLASHRT_CAPSULE_NAME "{cabi.CAPSULE_NAME.decode()}"' in HEADER.read_text()
    assert cabi.CAPSULE_NAME.endswith(f".v{cabi.ABI_VERSION}".encode())


def test_callbacks_have_the_arguments_that_the_header_declares(tmp_path: Path) -> None:
    source = tmp_path / "signatures.c"
    source.write_text(c_layout.signatures())
    compile_to(tmp_path / "signatures.o", source, flags=("-c",))


@pytest.mark.parametrize("standard", ["c11", "c17", "c++11", "c++17"])
def test_the_header_stands_alone_and_may_be_included_anywhere(tmp_path: Path, standard: str) -> None:
    one, other = tmp_path / "one.c", tmp_path / "other.c"
    one.write_text(
        '#include "flashrt_contract.h"\n#include "flashrt_contract.h"\nint main(void) { return !flashrt_act(NULL); }\n'
    )
    other.write_text('#include "flashrt_contract.h"\nint other(void);\nint other(void) { return flashrt_act(NULL); }\n')
    strict = ["-Wconversion", "-Wshadow"]
    if "+" in standard:
        strict += ["-Wold-style-cast"]
    compile_to(tmp_path / "program", one, other, standard=standard, flags=tuple(strict))
