"""The launch files, read as text: they are tested so wherever `launch_ros` is not installed, that is with pip alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import yaml

from flashrt_ros.node import demo
from flashrt_ros.node.parameters import find, is_policy_setting
from test.sources import ROOT

FILES = sorted((ROOT / "launch").glob("*.launch.py"))
ARGUMENTS = {
    "policy.launch.py": {"name", "namespace", "params_file", "autostart", "use_sim_time", "checkpoint", "device",
                         "instruction", "remap", "dds_profile", "log_level"},
    "demo.launch.py": {"params_file", "instruction"},
    "two_tasks.launch.py": {"rounds"},
}  # fmt: skip


def tree_of(name: str) -> ast.Module:
    return ast.parse((ROOT / "launch" / name).read_text())


def calls(tree: ast.Module, function: str) -> list[ast.Call]:
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function
    ]


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((k.value for k in call.keywords if k.arg == name), None)


def assigned(name: str, constant: str) -> ast.expr:
    """What a launch file assigns to one of its constants."""
    found = (n for n in tree_of(name).body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == constant)
    return next(found).value


def test_all_launch_files_are_there() -> None:
    assert {path.name for path in FILES} == ARGUMENTS.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_launch_file_compiles_and_imports_neither_the_node_nor_torch(path: Path) -> None:
    tree = ast.parse(path.read_text(), filename=str(path))
    compile(tree, str(path), "exec")
    roots = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            roots.add((node.module or "").split(".")[0])
    assert roots <= {"launch", "launch_ros", "sys"}
    assert any(isinstance(n, ast.FunctionDef) and n.name == "generate_launch_description" for n in tree.body)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_argument_is_described_and_has_a_default(name: str) -> None:
    declared = calls(tree_of(name), "DeclareLaunchArgument")
    for call in declared:
        assert keyword(call, "description") is not None, ast.unparse(call)
        assert keyword(call, "default_value") is not None, ast.unparse(call)
    names = {call.args[0].value for call in declared if isinstance(call.args[0], ast.Constant)}
    assert names == ARGUMENTS[name]


def test_files_and_executables_that_are_launched_exist() -> None:
    for name in ARGUMENTS:
        for call in calls(tree_of(name), "share"):
            parts = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            if parts:
                assert ROOT.joinpath(*parts).is_file(), parts
    node = calls(tree_of("policy.launch.py"), "LifecycleNode")[0]
    executable = keyword(node, "executable")
    assert isinstance(executable, ast.Constant)
    assert (ROOT / "bin" / str(executable.value)).is_file()


def test_the_demo_starts_modules_that_exist() -> None:
    folder = Path(demo.__file__).parent
    modules = {command[0] for command in ast.literal_eval(assigned("demo.launch.py", "SOURCES"))}
    assert modules
    assert all((folder / f"{module}.py").is_file() for module in modules)


def test_parameters_that_are_overridden_exist() -> None:
    overrides = ast.literal_eval(assigned("policy.launch.py", "OVERRIDES"))
    assert set(overrides) <= ARGUMENTS["policy.launch.py"]
    assert all(find(parameter) or is_policy_setting(parameter) for parameter in overrides.values())


@pytest.mark.parametrize("path", sorted((ROOT / "config").glob("*.yaml")), ids=lambda path: path.name)
def test_the_example_files_address_every_node_name(path: Path) -> None:
    assert set(yaml.safe_load(path.read_text())) == {"/**"}
