"""Makes `.venv` from nothing: checks the machine, installs the pinned dependencies, builds the package.

Run by the Makefile with the interpreter that scripts/find_python.sh found; needs only its standard library.
Every step is skipped when the digest of its inputs is that of the last success, so that a second call takes a
fraction of a second.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
CONSTRAINTS = ROOT / "requirements" / "constraints.txt"
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
# What the built package consists of, the Python modules apart: those run from the checkout (`link_checkout`).
PACKAGE_INPUTS = (
    "CMakeLists.txt",
    "package.xml",
    "pyproject.toml",
    "bin",
    "cmake",
    "config",
    "include",
    "kernels",
    "launch",
    "msg",
    "srv",
)


class SetupError(Exception):
    """The machine lacks something, or a step failed; the message says what, and what to do."""


def say(text: str) -> None:
    """Print one line of progress at once."""
    print(f"[setup] {text}", flush=True)


def digest(parts: Iterable[bytes]) -> str:
    """SHA-256 over `parts`, as hexadecimal digits; where one part ends and the next begins counts."""
    total = hashlib.sha256()
    for part in parts:
        total.update(hashlib.sha256(part).digest())
    return total.hexdigest()


class Stamp:
    """Remembers in the virtual environment for which inputs a step last succeeded."""

    def __init__(self, step: str, inputs: str) -> None:
        self.path = VENV / f"flashrt_{step}.stamp"
        self.inputs = inputs

    def is_current(self) -> bool:
        """Whether the step succeeded for these very inputs."""
        return self.path.is_file() and self.path.read_text() == self.inputs

    def write(self) -> None:
        """The step succeeded."""
        self.path.write_text(self.inputs)

    def remove(self) -> None:
        """The step begins: until `write`, what is installed counts as unknown."""
        self.path.unlink(missing_ok=True)


# --- The machine


def check_platform() -> None:
    """The ROS 2 packages of PyPI are built for one platform only."""
    found = f"{platform.system()} {platform.machine()}"
    if found != "Linux x86_64":
        raise SetupError(
            f"this is {found}, but the ROS 2 packages of PyPI exist for Linux x86_64 only; "
            "on a robot with ROS 2 Jazzy build with `colcon build` instead (see README.md)"
        )


def missing_packages() -> Iterator[tuple[str, str]]:
    """What the build needs and this machine lacks, as (what, Debian package that brings it)."""
    if importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
        yield "the venv module", f"python{VERSION}-venv"
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        yield "the headers of Python", f"python{VERSION}-dev"
    for variable, command, package in (("CC", "cc", "gcc"), ("CXX", "c++", "g++")):
        chosen = os.environ.get(variable, command).split()[0]
        if shutil.which(chosen) is None:
            yield f"a compiler ({chosen})", package


def check_tools() -> None:
    """Name everything that is missing at once, with the one command that installs it."""
    missing = list(missing_packages())
    if missing:
        what = ", ".join(name for name, _ in missing)
        packages = " ".join(package for _, package in missing)
        raise SetupError(f"this machine lacks {what}; install with: apt-get install {packages}")


# --- The virtual environment


def child_environment() -> dict[str, str]:
    """The environment for programs of `.venv`, also when another environment is active."""
    # Another installation of ROS sets these for itself; programs of .venv must find their own.
    python = {"_ROS_WHEELS_BOOTSTRAP_COMPLETE", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME"}
    foreign = python | {"AMENT_PREFIX_PATH", "CMAKE_PREFIX_PATH"}
    environment = {name: value for name, value in os.environ.items() if name not in foreign}
    environment["VIRTUAL_ENV"] = str(VENV)
    environment["PATH"] = f"{VENV / 'bin'}{os.pathsep}{environment.get('PATH', '')}"
    return environment


def run(*command: str | Path, failure: str) -> None:
    """Run `command`, its output going where ours goes; a failure raises SetupError with `failure`."""
    result = subprocess.run([str(part) for part in command], cwd=ROOT, env=child_environment())
    if result.returncode != 0:
        raise SetupError(failure)


def venv_version() -> str | None:
    """Version of a working `.venv` that has pip, as `3.11`; None if there is none."""
    if not VENV_PYTHON.exists():
        return None
    probe = "import pip, sys; print('%d.%d' % sys.version_info[:2])"
    answer = subprocess.run([VENV_PYTHON, "-c", probe], env=child_environment(), capture_output=True, text=True)
    return answer.stdout.strip() if answer.returncode == 0 else None


def make_venv() -> None:
    """Create `.venv`, or leave a working one of this interpreter's version as it is."""
    present = venv_version()
    if present == VERSION:
        return
    check_tools()
    if VENV.exists():
        say(f"replacing .venv, which is {'broken' if present is None else f'of Python {present}'}")
    say(f"creating .venv with Python {VERSION} ({sys.executable})")
    command = (sys.executable, "-m", "venv", "--clear", VENV)
    run(*command, failure=f"cannot create .venv; on Debian or Ubuntu: apt-get install python{VERSION}-venv")


# --- Dependencies


def requirements() -> list[str]:
    """Everything that pyproject.toml pins: to build, to run, for the demo and for the tests."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        settings = tomllib.load(file)
    project = settings["project"]
    extras = (name for extra in project["optional-dependencies"].values() for name in extra)
    return [*settings["build-system"]["requires"], *project["dependencies"], *extras]


def install_dependencies() -> None:
    """Install the pinned requirements, if they changed since the last time."""
    wanted = requirements()
    stamp = Stamp("dependencies", digest(part.encode() for part in (*wanted, CONSTRAINTS.read_text())))
    if stamp.is_current():
        return
    say(f"installing {len(wanted)} pinned packages and what they need; at first this takes some minutes")
    # An update would list everything that stays as it is.
    quiet = ("--quiet",) if stamp.path.is_file() else ()
    stamp.remove()
    pip = (VENV_PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "--prefer-binary", *quiet)
    # An index of PyTorch's CPU builds, for a machine without a GPU: PyPI's build is several gigabytes larger.
    torch_index = os.environ.get("TORCH_INDEX")
    index = ("--extra-index-url", torch_index) if torch_index else ()
    failure = "pip could not install the dependencies; its last lines above say why (network? space left?)"
    run(*pip, *index, "--constraint", CONSTRAINTS, *wanted, failure=failure)
    stamp.write()


# --- The package


def package_files() -> list[Path]:
    """Files whose change makes a new build necessary, sorted."""
    roots = (ROOT / name for name in PACKAGE_INPUTS)
    found = (path for root in roots for path in ([root] if root.is_file() else root.rglob("*")))
    return sorted(path for path in found if path.is_file() and "__pycache__" not in path.parts)


def package_digest() -> str:
    """Digest of the package's inputs: names and contents, and of the Python modules the names alone."""
    # The modules run from the checkout, but one that was deleted there must not live on as an installed copy.
    modules = (str(path.relative_to(ROOT)) for path in sorted((ROOT / "flashrt_ros").rglob("*.py")))
    files = package_files()
    names = (str(path.relative_to(ROOT)) for path in files)
    return digest([*(name.encode() for name in (*modules, *names)), *(path.read_bytes() for path in files)])


def site_packages() -> Path:
    """Folder of `.venv` that holds installed modules."""
    return VENV / "lib" / f"python{VERSION}" / "site-packages"


def link_checkout() -> None:
    """Let the sources of this checkout win over the installed copy in `.venv`, in any working directory.

    The interfaces stay those of the installed copy: the checkout has none, and `flashrt_ros/__init__.py`
    looks in both.
    """
    # Right before the installed copy, so that PYTHONPATH and with it a colcon workspace still come first.
    place = f"next((i for i, p in enumerate(sys.path) if p == {str(site_packages())!r}), len(sys.path))"
    line = f"import sys; {str(ROOT)!r} in sys.path or sys.path.insert({place}, {str(ROOT)!r})\n"
    link = site_packages() / "_flashrt_ros_checkout.pth"
    if not link.is_file() or link.read_text() != line:
        link.write_text(line)


def install_package() -> None:
    """Build and install the package with pip, if anything but its modules' text changed."""
    stamp = Stamp("package", package_digest())
    if stamp.is_current() and (site_packages() / "flashrt_ros" / "msg" / "__init__.py").is_file():
        return
    check_tools()
    say("building flashrt_ros with its ROS interfaces")
    stamp.remove()
    pip = (VENV_PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", "--force-reinstall")
    # The build requirements are in .venv already; a fixed build folder lets ninja skip what did not change.
    options = ("--no-deps", "--no-build-isolation", "--config-settings", f"build-dir=build/pip-{VERSION}")
    failure = "flashrt_ros could not be built; the compiler's or CMake's message is above"
    run(*pip, *options, ROOT, failure=failure)
    stamp.write()


def main() -> int:
    """Run all steps; the exit status is 0, or 1 after one line that says what went wrong."""
    began = time.monotonic()
    try:
        check_platform()
        make_venv()
        install_dependencies()
        install_package()
        link_checkout()
    except SetupError as error:
        print(f"[setup] error: {error}", file=sys.stderr)
        return 1
    took = time.monotonic() - began
    if took > 2.0:
        say(f"ready after {took:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
