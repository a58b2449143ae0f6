"""The build's files agree with one another, with what the sources import, and with what is installed."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from catkin_pkg.package import Package, parse_package
from packaging.requirements import Requirement

import flashrt_ros
import flashrt_ros.msg
from test.sources import ROOT, checkout_environment, package_modules

PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
CMAKE = (ROOT / "CMakeLists.txt").read_text()
# Name in an import statement -> name in pyproject.toml, where they differ.
DISTRIBUTION = {"cv2": "opencv-python-headless", "skimage": "scikit-image", "yaml": "pyyaml"}
# Imported only where they are installed by other means, with an answer for their absence.
OPTIONAL = {"cv_bridge", "launch", "launch_ros", "cuda", "triton"}


@pytest.fixture(scope="module")
def manifest() -> Package:
    return parse_package(str(ROOT / "package.xml"))


def requirements(*groups: list[str]) -> dict[str, Requirement]:
    """Parsed requirements by normalised name."""
    parsed = (Requirement(line) for group in groups for line in group)
    return {requirement.name.lower().replace("_", "-"): requirement for requirement in parsed}


def all_requirements() -> dict[str, Requirement]:
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"].values()
    return requirements(PYPROJECT["build-system"]["requires"], project["dependencies"], *extras)


def third_party_imports() -> set[str]:
    """Top-level names that the package imports and that are neither its own nor the standard library's."""
    names = {name.split(".")[0] for module in package_modules() for name in module.imports()}
    return names - sys.stdlib_module_names - {"flashrt_ros"}


def is_of_ros(name: str) -> bool:
    return name == "rclpy" or name.endswith(("_msgs", "_srvs", "_interfaces"))


def names(dependencies: list[Any]) -> set[str]:
    return {dependency.name for dependency in dependencies}


# --- The manifests agree


def test_package_xml_is_valid_for_ros(manifest: Package) -> None:
    warnings: list[str] = []
    manifest.validate(warnings=warnings)
    assert not warnings
    assert manifest.package_format == 3
    assert manifest.get_build_type() == "ament_cmake"
    assert "rosidl_interface_packages" in {group.name for group in manifest.member_of_groups}


def test_the_version_is_the_same_everywhere(manifest: Package) -> None:
    versions = {manifest.version, PYPROJECT["project"]["version"], flashrt_ros.__version__}
    assert len(versions) == 1


def test_the_licence_is_the_same_everywhere(manifest: Package) -> None:
    assert {*manifest.licenses, PYPROJECT["project"]["license"]} == {"Apache-2.0"}
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_cmake_finds_only_what_package_xml_declares(manifest: Package) -> None:
    found = set(re.findall(r"find_package\((\w+)", CMAKE))
    declared = names(manifest.buildtool_depends) | names(manifest.build_depends) | names(manifest.test_depends)
    assert {"rosidl_default_generators", "lifecycle_msgs"} <= found <= declared


def test_cmake_builds_every_interface() -> None:
    files = {f"{path.parent.name}/{path.name}" for path in [*ROOT.glob("msg/*"), *ROOT.glob("srv/*")]}
    assert set(re.findall(r"\b(?:msg|srv)/\w+\.(?:msg|srv)", CMAKE)) == files


def test_interfaces_use_only_packages_that_cmake_and_package_xml_name(manifest: Package) -> None:
    text = "\n".join(path.read_text() for path in [*ROOT.glob("msg/*"), *ROOT.glob("srv/*")])
    used = set(re.findall(r"^(\w+)/\w+(?:\[\])? ", text, flags=re.MULTILINE)) - {"flashrt_ros"}
    linked = re.search(r"DEPENDENCIES ([\w ]+)", CMAKE)
    assert linked is not None
    assert set(linked[1].split()) == used
    assert used <= names(manifest.build_depends) & names(manifest.exec_depends)


def test_cmake_installs_every_program_and_each_can_be_run() -> None:
    line = re.search(r"install\(PROGRAMS ([^)]*?) DESTINATION lib/", CMAKE)
    assert line is not None
    programs = sorted(path for path in (ROOT / "bin").iterdir() if path.is_file())
    assert line[1].split() == [f"bin/{path.name}" for path in programs]
    for path in programs:
        ast.parse(path.read_text())
        assert path.read_text().startswith("#!/usr/bin/env python3\n")
        assert os.access(path, os.X_OK)


def test_setup_py_says_how_to_build() -> None:
    command = [sys.executable, "setup.py", "install"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1
    assert "pip install ." in result.stderr
    assert "colcon build" in result.stderr


# --- The dependencies are declared, pinned and explained


def test_package_xml_declares_every_ros_package_that_is_imported(manifest: Package) -> None:
    imported = {name for name in third_party_imports() if is_of_ros(name) or name in ("cv_bridge", "launch_ros")}
    assert imported <= names(manifest.exec_depends)


def test_pyproject_declares_everything_that_is_imported() -> None:
    declared = all_requirements()
    undeclared = {
        name
        for name in third_party_imports() - OPTIONAL
        if DISTRIBUTION.get(name, name).replace("_", "-") not in declared
        and f"ros-{name.replace('_', '-')}" not in declared
    }
    assert not undeclared


def test_every_requirement_is_pinned_to_one_version() -> None:
    loose = [str(req) for req in all_requirements().values() if not re.fullmatch(r"==[\w.]+", str(req.specifier))]
    assert not loose


def test_every_requirement_is_explained() -> None:
    text = (ROOT / "docs" / "dependencies.md").read_text().lower()
    assert not [name for name in all_requirements() if f"`{name}`" not in text.replace("_", "-")]


def test_the_constraints_are_of_the_pinned_versions() -> None:
    lines = (ROOT / "requirements" / "constraints.txt").read_text().splitlines()
    locked = requirements([line for line in lines if not line.startswith("#")])
    for name, requirement in all_requirements().items():
        assert locked[name].specifier == requirement.specifier, name


def test_the_robot_gets_what_rosdep_does_not_bring(manifest: Package) -> None:
    lines = (ROOT / "requirements" / "robot.txt").read_text().splitlines()
    from_pip = set(requirements([line for line in lines if not line.startswith("#")]))
    runtime = {name for name in requirements(PYPROJECT["project"]["dependencies"]) if not name.startswith("ros-")}
    from_rosdep = {"numpy": "python3-numpy", "opencv-python-headless": "python3-opencv", "pyyaml": "python3-yaml"}
    assert set(from_rosdep.values()) <= names(manifest.exec_depends)
    assert from_pip == runtime - from_rosdep.keys()


# --- What is installed is what the checkout says


def share_folder() -> Path:
    """share/flashrt_ros of the installation that the interfaces come from."""
    interfaces = Path(flashrt_ros.msg.__file__)
    return next(p / "share" / "flashrt_ros" for p in interfaces.parents if (p / "share" / "flashrt_ros").is_dir())


@pytest.mark.parametrize("folder", ["config", "kernels", "launch"])
def test_the_installed_data_are_those_of_the_checkout(folder: str) -> None:
    sources = [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sources
    for path in sources:
        assert (share_folder() / path.relative_to(ROOT)).read_bytes() == path.read_bytes(), path


def test_the_sources_of_a_checkout_win_over_the_installed_copy(tmp_path: Path) -> None:
    program = "import flashrt_ros.contract, flashrt_ros.msg as m; print(flashrt_ros.contract.__file__, m.__file__)"
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=tmp_path, env=checkout_environment(), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    sources, interfaces = result.stdout.split()
    assert sources == str(ROOT / "flashrt_ros" / "contract" / "__init__.py")
    assert interfaces == flashrt_ros.msg.__file__
    assert not interfaces.startswith(str(ROOT / "flashrt_ros"))


def test_the_tests_themselves_run_the_checkout() -> None:
    assert flashrt_ros.__file__ == str(ROOT / "flashrt_ros" / "__init__.py")


def test_continuous_integration_runs_exactly_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().splitlines()[-1] == "exec make test"
