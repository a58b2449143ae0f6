"""What several tests of measuring start from: a tiny checkpoint and pictures."""

from __future__ import annotations

from pathlib import Path

import cv2
import pytest

from test.measure.tiny import pictures, write_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "checkpoint")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    target = tmp_path_factory.mktemp("images")
    for index, picture in enumerate(pictures(3)):
        cv2.imwrite(str(target / f"{index}.png"), picture)
    return [str(path) for path in sorted(target.iterdir())]
