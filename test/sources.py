"""What the tests about the sources themselves share: the files of the checkout, and what they import."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "flashrt_ros"


def checkout_environment() -> dict[str, str]:
    """The environment of a child process that is to import this checkout first, whatever its working directory."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


@dataclass(frozen=True)
class Module:
    """One Python file of the package."""

    path: Path

    @property
    def name(self) -> str:
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def layer(self) -> str:
        """The folder right below the package; empty for the package's own `__init__`."""
        return self.name.split(".")[1] if "." in self.name else ""

    @property
    def tree(self) -> ast.Module:
        return _parse(self.path)

    def imports(self) -> Iterator[str]:
        """Absolute names of what is imported anywhere in the file, inside functions too."""
        package = self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                origin = _absolute(node, package)
                # `from package import module` imports the module too, so both names count.
                yield from (f"{origin}.{alias.name}" for alias in node.names)


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parents = package.split(".")
    above = parents[: len(parents) - node.level + 1]
    return ".".join([*above, node.module] if node.module else above)


@cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def package_modules() -> list[Module]:
    """Every Python file of the package, sorted."""
    return [Module(path) for path in sorted((ROOT / PACKAGE).rglob("*.py"))]
