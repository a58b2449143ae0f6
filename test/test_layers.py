"""The import directions of the package, and that nothing outside `node` needs ROS."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from test.sources import PACKAGE, ROOT, Module, checkout_environment, package_modules

# Folder -> the folders that it may import. Everything else is a wall.
MAY_IMPORT = {
    "contract": set[str](),
    "engine": {"contract"},
    "ops": {"contract", "engine"},
    "precision": {"contract", "engine", "ops"},
    "policies": {"contract", "engine", "ops", "precision"},
    "accelerate": {"contract", "engine", "ops", "precision", "policies"},
    "measure": {"contract", "engine", "ops", "precision", "policies"},
    "node": {"contract", "engine", "ops", "precision", "policies", "accelerate"},
    "cli": {"contract", "engine", "ops", "precision", "policies", "accelerate", "measure", "node"},
}
ROS = ("rclpy", "launch", "launch_ros", "flashrt_ros.msg", "flashrt_ros.srv", "cv_bridge")
MODULES = package_modules()


def belongs_to(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def loaded_after_importing(names: list[str]) -> set[str]:
    """Modules that a fresh interpreter has loaded after it imported `names`."""
    program = "import importlib, json, sys; [importlib.import_module(name) for name in json.loads(sys.argv[1])]"
    report = "; print(json.dumps(sorted(sys.modules)))"
    command = [sys.executable, "-c", program + report, json.dumps(names)]
    result = subprocess.run(command, cwd=ROOT, env=checkout_environment(), capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return set(json.loads(result.stdout.splitlines()[-1]))


def test_every_folder_has_its_place_in_the_order() -> None:
    folders = {module.layer for module in MODULES} - {""}
    assert folders <= MAY_IMPORT.keys()


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)
def test_imports_point_down_the_order_only(module: Module) -> None:
    if not module.layer:
        return
    ours = {name.split(".")[1] for name in module.imports() if name.startswith(f"{PACKAGE}.")}
    folders = ours & MAY_IMPORT.keys()
    assert folders - {module.layer} <= MAY_IMPORT[module.layer], f"{module.path} reaches up"


def test_only_the_node_and_the_command_line_mention_ros() -> None:
    offenders = {
        module.name: name
        for module in MODULES
        for name in module.imports()
        if belongs_to(name, ROS) and module.layer not in ("node", "cli")
    }
    assert not offenders


def test_importing_everything_outside_the_node_leaves_rclpy_out() -> None:
    names = [module.name for module in MODULES if module.layer != "node" and not module.name.endswith("__main__")]
    loaded = loaded_after_importing(names)
    assert set(names) <= loaded
    assert not {name for name in loaded if belongs_to(name, ("rclpy", "flashrt_ros.node", "flashrt_ros.msg"))}


def test_the_modules_of_the_node_that_know_no_ros_are_importable_without_it() -> None:
    names = [module.name for module in MODULES if module.layer == "node" and not mentions_ros(module)]
    assert {"flashrt_ros.node.cdr", "flashrt_ros.node.freshness", "flashrt_ros.node.joints"} <= set(names)
    loaded = loaded_after_importing(names)
    assert not {name for name in loaded if belongs_to(name, ("rclpy", "sensor_msgs", "flashrt_ros.msg"))}


def mentions_ros(module: Module) -> bool:
    """Whether `module`, or a module of the node that it imports, imports ROS or a message."""
    by_name = {other.name: other for other in MODULES}
    pending, seen = [module], set[str]()
    while pending:
        current = pending.pop()
        seen.add(current.name)
        names = list(current.imports())
        if any(belongs_to(name, ROS) or "_msgs" in name for name in names):
            return True
        parents = (name.rpartition(".")[0] for name in names)
        found = {by_name[name] for name in (*names, *parents) if name in by_name and name not in seen}
        pending.extend(other for other in found if other.layer == "node")
    return False


def test_the_contract_needs_the_standard_library_only() -> None:
    loaded = loaded_after_importing(["flashrt_ros.contract"])
    assert "flashrt_ros.contract" in loaded
    assert not loaded & {"torch", "numpy", "yaml", "cv2"}


def test_the_engine_needs_no_model_and_no_image_library() -> None:
    loaded = loaded_after_importing(["flashrt_ros.engine"])
    assert "torch" in loaded
    assert not loaded & {"cv2", "sentencepiece", "flashrt_ros.policies", "flashrt_ros.ops"}
