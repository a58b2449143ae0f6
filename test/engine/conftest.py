"""The C client, compiled once a run as C and as C++."""

from __future__ import annotations

import pytest

from .c_client import SOURCE, Client, Driver
from .c_compiler import compile_library
from .toy import make_session


@pytest.fixture(scope="session", params=["c11", "c++17"])
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Client:
    return Client(compile_library(tmp_path_factory.mktemp("client"), SOURCE, request.param))


@pytest.fixture
def driver(client: Client) -> Driver:
    """On a toy session that has acted once."""
    session = make_session()
    session.act()
    return Driver(client, session)
