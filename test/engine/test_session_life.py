"""A session's life: prepared, configured once, driven by one thread, closed."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from flashrt_ros.contract import Buffer, Contract, DType, Rate, Region, Role, Stage, Variant
from flashrt_ros.engine import (
    DeviceError,
    EngineError,
    RoleError,
    Session,
    StateError,
    UnfilledWindowError,
    WindowError,
)

from ..contract.builders import IDENTITY, make_contract
from .toy import BODIES, image, make_session


def test_nothing_runs_before_configure_and_configure_runs_once() -> None:
    session = Session(make_contract(), BODIES)
    with pytest.raises(StateError, match="not configured"):
        session.act()
    session.configure()
    with pytest.raises(StateError, match="configured once"):
        session.configure()


def test_a_body_that_cannot_run_fails_at_configure() -> None:
    def wrong(buffers: Mapping[str, torch.Tensor], variant: Variant) -> None:
        buffers["kv"].copy_(torch.zeros(3))

    with pytest.raises(RuntimeError):
        make_session(bodies={**BODIES, "context": wrong})


def test_a_closed_session_says_so_and_closes_again() -> None:
    session = make_session()
    session.close()
    session.close()
    for call in (
        session.act,
        session.draw,
        lambda: session.read("actions"),
        lambda: session.arena,
    ):
        with pytest.raises(StateError, match="closed"):
            call()


@pytest.mark.parametrize(
    ("bodies", "message"),
    [
        (
            {k: v for k, v in BODIES.items() if k != "context"},
            "declares stage 'context', but no body",
        ),
        ({**BODIES, "extra": BODIES["action"]}, "given for 'extra'"),
    ],
)
def test_bodies_must_match_the_stages(bodies: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        Session(make_contract(), bodies).configure()


@pytest.mark.parametrize("device", ["gpu", "meta", "cuda:99"])
def test_devices_that_are_not_there(device: str) -> None:
    with pytest.raises(DeviceError, match="device '"):
        Session(make_contract(), BODIES, device)


def test_two_threads_cannot_drive_one_session() -> None:
    inside, leave = threading.Event(), threading.Event()

    def slow(buffers: object, variant: object) -> None:
        inside.set()
        assert leave.wait(10)

    leave.set()
    session = make_session(bodies={**BODIES, "action": slow})
    inside.clear()
    leave.clear()
    thread = threading.Thread(target=session.act)
    thread.start()
    assert inside.wait(10)
    try:
        with pytest.raises(StateError, match="being driven already"):
            session.fill("image", image(1))
    finally:
        leave.set()
        thread.join()
    session.fill("image", image(1))


def _weights_contract() -> Contract:
    buffers = (
        Buffer("weights", (2,), DType.FLOAT32, Role.STATIC),
        Buffer("x", (2,), DType.FLOAT32, Role.SWAP, Rate.OBSERVATION),
        Buffer("y", (2,), DType.BFLOAT16, Role.STATE),
    )
    stages = (Stage("mul", Rate.OBSERVATION, ("weights", "x"), ("y",)),)
    return Contract("mul", buffers, stages, IDENTITY, (Region("y", "y", 0, 4),))


def _mul(buffers: Mapping[str, torch.Tensor], variant: Variant) -> None:
    buffers["y"].copy_(buffers["weights"] * buffers["x"])


def test_static_buffers_without_a_writer_are_prepared_before_configure_only() -> None:
    session = Session(_weights_contract(), {"mul": _mul})
    with pytest.raises(UnfilledWindowError, match="'weights' was not prepared"):
        session.configure()
    with pytest.raises(WindowError, match="'weights' holds"):
        session.prepare("weights", torch.ones(3))
    with pytest.raises(RoleError, match="'x' is not a STATIC buffer"):
        session.prepare("x", torch.ones(2))
    session.prepare("weights", torch.tensor([2.0, 3.0]))
    session.configure()
    with pytest.raises(RoleError, match="read-only after configure"):
        session.prepare("weights", torch.ones(2))
    session.fill("x", np.array([10, 20], np.float32))
    session.act()
    np.testing.assert_array_equal(session.read("y"), np.array([20, 60], np.float32))


def test_a_stage_that_updates_its_own_state_is_not_stale_by_its_own_write() -> None:
    buffers = (
        Buffer("x", (1,), DType.INT32, Role.SWAP, Rate.OBSERVATION),
        Buffer("sum", (1,), DType.INT32, Role.STATE),
    )
    stages = (Stage("add", Rate.OBSERVATION, ("x", "sum"), ("sum",)),)
    contract = Contract("acc", buffers, stages, IDENTITY, (Region("sum", "sum", 0, 4),))

    def add(buffers: Mapping[str, torch.Tensor], variant: Variant) -> None:
        buffers["sum"].add_(buffers["x"])

    session = Session(contract, {"add": add})
    session.configure()
    for value in (1, 2, 3):
        session.fill("x", np.array([value], np.int32))
        assert session.act() == ("add",)
        assert session.act() == ()
    assert session.read("sum")[0] == 6  # configure ran the body too, and left no trace
