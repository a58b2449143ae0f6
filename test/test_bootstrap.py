"""The set-up behind the two commands: it finds a Python, says what is missing, and repeats only what must be."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import bootstrap
from test.sources import ROOT

FINDER = ROOT / "scripts" / "find_python.sh"


def fake_python(folder: Path, name: str, version: str) -> Path:
    """An executable that claims to be a Python of `version`, and to lie where it lies."""
    path = folder / name
    script = f'#!/bin/sh\ncase "$2" in *version_info*) echo {version} ;; *) echo "{path}" ;; esac\n'
    path.write_text(script)
    path.chmod(0o755)
    return path


def find_python(path: Path, chosen: str = "") -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(path), "PYTHON": chosen}
    return subprocess.run(["/bin/sh", str(FINDER)], env=environment, capture_output=True, text=True)


# --- Finding a Python


def test_the_python_of_the_system_is_preferred(tmp_path: Path) -> None:
    fake_python(tmp_path, "python3.12", "3.12")
    system = fake_python(tmp_path, "python3", "3.11")
    assert find_python(tmp_path).stdout.strip() == str(system)


def test_another_python_is_found_beside_an_unfit_one(tmp_path: Path) -> None:
    fake_python(tmp_path, "python3", "3.13")
    fit = fake_python(tmp_path, "python3.12", "3.12")
    assert find_python(tmp_path).stdout.strip() == str(fit)


def test_a_chosen_python_is_taken(tmp_path: Path) -> None:
    fake_python(tmp_path, "python3", "3.11")
    chosen = fake_python(tmp_path, "other", "3.12")
    assert find_python(tmp_path, str(chosen)).stdout.strip() == str(chosen)


@pytest.mark.parametrize("version", ["3.10", "3.13"])
def test_a_wrong_python_is_refused_in_one_line(tmp_path: Path, version: str) -> None:
    fake_python(tmp_path, "python3", version)
    result = find_python(tmp_path)
    assert result.returncode == 1
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert f"python3 here is: {version}" in result.stderr


def test_a_missing_python_is_told_in_one_line_with_its_package(tmp_path: Path) -> None:
    result = find_python(tmp_path)
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert "apt-get install python3" in result.stderr


def test_a_chosen_python_of_a_wrong_version_is_not_replaced_in_silence(tmp_path: Path) -> None:
    fake_python(tmp_path, "python3", "3.11")
    chosen = fake_python(tmp_path, "other", "3.9")
    result = find_python(tmp_path, str(chosen))
    assert result.returncode == 1
    assert result.stdout == ""
    assert f"PYTHON={chosen} is 3.9" in result.stderr


# --- What the machine lacks


def without(missing: str) -> Callable[..., str | None]:
    """`shutil.which` on a machine without `missing`."""
    return lambda command, *rest, **options: None if command == missing else f"/usr/bin/{command}"


def test_a_missing_compiler_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", without("c++"))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(bootstrap.SetupError, match=r"lacks a compiler \(c\+\+\).*apt-get install .*g\+\+"):
        bootstrap.check_tools()


def test_all_that_is_missing_is_told_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda *args, **options: None)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(bootstrap.SetupError) as caught:
        bootstrap.check_tools()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    install = f"apt-get install python{version}-venv python{version}-dev gcc g++"
    assert str(caught.value).endswith(install)


def test_a_chosen_compiler_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", without("c++"))
    monkeypatch.setenv("CXX", "clang++ -stdlib=libc++")
    assert "g++" not in {package for _, package in bootstrap.missing_packages()}


def test_a_robot_is_sent_to_colcon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(bootstrap.SetupError, match=r"Linux aarch64.*colcon build"):
        bootstrap.check_platform()


def test_a_failure_ends_with_one_line_and_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Plan9")
    assert bootstrap.main() == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


# --- Repeating only what must be


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small tree in place of the checkout."""
    for name in ("msg/A.msg", "srv/B.srv", "launch/c.launch.py", "flashrt_ros/contract/d.py", "CMakeLists.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("content")
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    monkeypatch.setattr(bootstrap, "VENV", tmp_path / ".venv")
    (tmp_path / ".venv").mkdir()
    return tmp_path


@pytest.mark.parametrize("name", ["msg/A.msg", "srv/B.srv", "launch/c.launch.py", "CMakeLists.txt"])
def test_a_changed_input_makes_a_new_build_necessary(checkout: Path, name: str) -> None:
    before = bootstrap.package_digest()
    (checkout / name).write_text("changed")
    assert bootstrap.package_digest() != before


def test_a_renamed_message_makes_a_new_build_necessary(checkout: Path) -> None:
    before = bootstrap.package_digest()
    (checkout / "msg" / "A.msg").rename(checkout / "msg" / "Z.msg")
    assert bootstrap.package_digest() != before


def test_the_text_of_a_module_does_not_make_a_new_build_necessary_but_its_removal_does(checkout: Path) -> None:
    before = bootstrap.package_digest()
    module = checkout / "flashrt_ros" / "contract" / "d.py"
    module.write_text("changed")
    assert bootstrap.package_digest() == before
    module.unlink()
    assert bootstrap.package_digest() != before


def test_a_step_that_was_interrupted_is_not_current(checkout: Path) -> None:
    stamp = bootstrap.Stamp("package", "inputs")
    assert not stamp.is_current()
    stamp.write()
    assert bootstrap.Stamp("package", "inputs").is_current()
    assert not bootstrap.Stamp("package", "other inputs").is_current()
    stamp.remove()
    assert not stamp.is_current()


def test_a_program_of_the_environment_inherits_nothing_of_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/elsewhere/lib")
    monkeypatch.setenv("_ROS_WHEELS_BOOTSTRAP_COMPLETE", "1")
    monkeypatch.setenv("CMAKE_PREFIX_PATH", "/opt/ros/jazzy")
    environment = bootstrap.child_environment()
    inherited = {"LD_LIBRARY_PATH", "_ROS_WHEELS_BOOTSTRAP_COMPLETE", "CMAKE_PREFIX_PATH"}
    assert not inherited & environment.keys()
    assert environment["PATH"].startswith(f"{bootstrap.VENV / 'bin'}:")
