"""The example of docs/c_interface.md does what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from test.sources import ROOT, checkout_environment

from .c_compiler import INCLUDE

PAGE = (ROOT / "docs" / "c_interface.md").read_text()


def block(language: str) -> str:
    """The one code block of the page in `language`."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert len(found) == 1, language
    return str(found[0])


def test_the_example_prints_what_the_page_says(tmp_path: Path) -> None:
    for name, text in (("camera.c", block("c")), ("host.py", block("python"))):
        assert text.splitlines()[0].strip("/*# ") == name
        (tmp_path / name).write_text(text)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**checkout_environment(), "PATH": path, "FLASHRT_INCLUDE": str(INCLUDE)}
    command = ["sh", "-e", "-c", block("sh")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == block("text")
