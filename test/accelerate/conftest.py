"""Which candidates are kept must not depend on how busy the machine is: the latency gate counts operations here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flashrt_ros.accelerate import latency
from test.accelerate.operations import counted


@pytest.fixture(autouse=True, scope="module")
def operations_as_time() -> Iterator[None]:
    """Everything about the gate is real but its clock. A module that wants the clock has a fixture of this name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latency, "_timed", counted)
        yield
