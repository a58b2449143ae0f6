"""Writes the figures that README.md takes from committed results, each behind a comment that names file and key.

    python scripts/readme_figures.py

A mark is `<!-- NAME.json KEY.KEY -->` with the figure right behind it; a key that is a number is an index. A figure
that is the result, rounded, stays as it is written.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SAME = 0.005  # relative; what test/node/test_readme.py allows
MARK = re.compile(r"(<!-- (\w+)\.json ([\w.-]+) -->)([^\s|]+)")


def figure(results: Path, file: str, key: str) -> float:
    """The value at a dotted key of a result; KeyError names file and key of what is missing or no number."""
    value: Any = json.loads((results / f"{file}.json").read_text())
    try:
        for part in key.split("."):
            value = value[int(part)] if isinstance(value, list) else value[part]
        return float(value)
    except (KeyError, IndexError, TypeError, ValueError):
        raise KeyError(f"{file}.json has no number at {key}") from None


def shown(value: float) -> str:
    """A figure as a reader wants it: whole numbers without a point."""
    return str(int(value)) if value == int(value) else str(value)


def is_rounded(written: str, value: float) -> bool:
    """Whether `written` is `value` to as many places as it has, and these suffice."""
    try:
        figure = float(written)
    except ValueError:
        return False
    places = len(written.partition(".")[2])
    return figure == round(value, places) and math.isclose(figure, value, rel_tol=SAME)


def refreshed(text: str, results: Path) -> str:
    """`text` with every marked figure as the results have it."""

    def replaced(match: re.Match[str]) -> str:
        mark, file, key, written = match.groups()
        value = figure(results, file, key)
        return mark + (written if is_rounded(written, value) else shown(value))

    return MARK.sub(replaced, text)


def main() -> None:
    """Rewrite README.md if a figure has changed."""
    readme = ROOT / "README.md"
    before = readme.read_text()
    after = refreshed(before, ROOT / "benchmarks" / "results")
    if after != before:
        readme.write_text(after)
    changed = sum(old != new for old, new in zip(before.splitlines(), after.splitlines(), strict=True))
    print(f"README.md: {len(MARK.findall(after))} figures, {changed} lines changed")


if __name__ == "__main__":
    main()
