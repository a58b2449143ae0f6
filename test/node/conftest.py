"""Fixtures of the node's tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Read when the first context of the process is made: nothing leaves this machine, and nothing foreign comes in.
os.environ["ROS_AUTOMATIC_DISCOVERY_RANGE"] = "LOCALHOST"
os.environ.pop("ROS_DOMAIN_ID", None)

from flashrt_ros.node.demo.network import own_domain
from test.node.latch import LATCH
from test.node.rig import Rig


@pytest.fixture
def domain() -> Iterator[int]:
    """A ROS domain that nobody else on this machine uses."""
    with own_domain() as number:
        yield number


@pytest.fixture
def rig(domain: int) -> Iterator[Rig]:
    """A ROS graph of the test's own."""
    graph = Rig(domain)
    yield graph
    LATCH.open()
    graph.close()
