"""The session replays exactly what is stale and refuses everything that would use old data."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from flashrt_ros.contract import (
    Buffer,
    Contract,
    ContractError,
    DType,
    Rate,
    Region,
    Role,
    Stage,
    Variant,
)
from flashrt_ros.engine import (
    DeviceError,
    EngineError,
    RoleError,
    Session,
    StaleInputError,
    StaleVariantError,
    StateError,
    UncapturedShapeError,
    UnfilledWindowError,
    WindowError,
)

from ..contract.builders import IDENTITY, make_contract
from .toy import BODIES, expected, image, make_session, tokens

ALL = ("prompt", "context", "action")  # configure ran "tables"


def test_the_first_act_replays_everything_and_computes_the_right_values() -> None:
    session = make_session()
    assert session.act() == ALL
    noise = session.read("noise")
    np.testing.assert_array_equal(session.read("actions"), expected(image(1), tokens(5, 6, 7, 8), noise))


@pytest.mark.parametrize(
    ("change", "replayed"),
    [
        (lambda s: None, ()),
        (lambda s: s.draw("noise"), ("action",)),
        (lambda s: s.fill("image", image(9)), ("context", "action")),
        (
            lambda s: s.fill("image", image(1)),
            ("context", "action"),
        ),  # equal bytes are still a new observation
        (
            lambda s: s.fill("tokens", tokens(1, 2, 3, 4)),
            ("prompt", "context", "action"),
        ),
        (lambda s: s.select("long"), ("prompt", "context", "action")),
        (lambda s: s.select("short"), ()),
    ],
)
def test_act_replays_exactly_what_a_change_made_stale(change: object, replayed: tuple[Any, ...]) -> None:
    session = make_session()
    session.act()
    change(session)  # type: ignore[operator]
    assert session.act() == replayed
    assert session.act() == ()


def test_counts_follow_the_replays() -> None:
    session = make_session()
    for _ in range(3):
        session.draw()
        session.act()
    assert dict(session.counts) == {"tables": 1, "prompt": 1, "context": 1, "action": 3}


def test_the_selected_shape_decides_what_is_computed() -> None:
    session = make_session()
    session.select("long")
    session.act()
    noise = session.read("noise")
    np.testing.assert_array_equal(session.read("actions"), expected(image(1), tokens(5, 6, 7, 8), noise, live=4))


def test_replaying_by_hand_after_a_forgotten_stage_is_refused() -> None:
    session = make_session()
    session.act()
    session.fill("image", image(2))
    with pytest.raises(StaleInputError) as caught:
        session.replay("action")
    error = caught.value
    assert (error.reader, error.writer, error.buffer) == (
        "stage 'action'",
        "context",
        "image",
    )
    assert (error.consumed, error.current) == (1, 2)
    assert "'image' at version 1" in str(error)
    assert session.stale_refusals == 1


def test_staleness_is_seen_through_intermediate_stages() -> None:
    session = make_session()
    session.act()
    session.fill("tokens", tokens(0, 0, 0, 0))
    with pytest.raises(StaleInputError, match="stage 'prompt' consumed 'tokens' at version 1"):
        session.replay("action")
    session.replay("prompt")
    with pytest.raises(StaleInputError, match="stage 'context' consumed 'prompt'"):
        session.replay("action")
    session.replay("context")
    session.replay("action")
    assert session.act() == ()


def test_a_stage_that_never_ran_is_stale() -> None:
    with pytest.raises(StaleInputError, match="stage 'prompt' never ran"):
        make_session().replay("action")


def test_another_shape_makes_a_hand_replay_stale() -> None:
    session = make_session()
    session.act()
    session.select("long")
    with pytest.raises(StaleVariantError, match="ran for shape 'short', and 'long' is selected"):
        session.replay("action")


def test_reading_a_stale_result_is_refused() -> None:
    session = make_session()
    session.act()
    session.fill("image", image(3))
    with pytest.raises(StaleInputError, match="reading 'actions' would use stale data"):
        session.read("actions")
    session.act()
    assert session.read("actions").shape == (4,)


def test_windows_that_were_never_filled_are_named() -> None:
    session = Session(make_contract(), BODIES)
    session.configure()
    session.fill("image", image(1))
    with pytest.raises(
        UnfilledWindowError, match="stage 'prompt' needs windows that nobody filled since configure or restore: tokens"
    ):
        session.act()


def test_equal_seeds_give_equal_bits_and_other_seeds_do_not() -> None:
    def run(seed: int) -> bytes:
        session = make_session(seed)
        session.act()
        return session.read("actions").tobytes()

    assert run(7) == run(7)
    assert run(7) != run(8)


def test_seed_restarts_the_noise() -> None:
    session = make_session(3)
    first = session.read("noise")
    session.draw()
    assert not np.array_equal(session.read("noise"), first)
    session.seed(3)
    session.draw()
    np.testing.assert_array_equal(session.read("noise"), first)


def test_a_window_is_the_same_memory_every_time() -> None:
    session = make_session()
    with session.window("image") as first:
        address = first.ctypes.data
    with session.window("image") as again:
        assert again.ctypes.data == address == session.arena.address("image")


def test_addresses_are_aligned_and_do_not_move() -> None:
    session = make_session()
    before = {name: session.arena.address(name) for name in session.arena}
    session.act()
    assert {name: session.arena.address(name) for name in session.arena} == before
    assert all(address % 256 == 0 for address in before.values())


def test_a_partly_filled_window_bumps_the_version() -> None:
    session = make_session()
    session.act()
    with session.window("image", rows=3) as part:
        assert part.shape == (3,)
        part[:] = 200
    np.testing.assert_array_equal(session.read("image"), [200, 200, 200, 1, 1, 1, 1, 1])
    assert session.act() == ("context", "action")


def test_a_block_that_breaks_off_still_makes_readers_stale() -> None:
    session = make_session()
    session.act()
    with pytest.raises(ZeroDivisionError), session.window("image") as view:
        view[0] = 1 // 0
    assert session.act() == ("context", "action")


@pytest.mark.parametrize("rows", [0, -1, 9])
def test_rows_outside_the_window(rows: int) -> None:
    with (
        pytest.raises(WindowError, match="has 8 rows"),
        make_session().window("image", rows=rows),
    ):
        raise AssertionError("the block must not run")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("image", np.zeros(7, np.uint8)),
        ("image", np.zeros(8, np.float32)),
        ("image", np.zeros((8, 1), np.uint8)),
        ("tokens", np.zeros(4, np.int64)),
    ],
)
def test_data_that_does_not_fit_a_window_is_refused_and_nothing_changes(name: str, value: np.ndarray) -> None:
    session = make_session()
    before = session.versions
    with pytest.raises(WindowError, match=f"window '{name}' holds"):
        session.fill(name, value)
    assert session.versions == before


@pytest.mark.parametrize(
    ("name", "word"),
    [("table", "STATIC"), ("kv", "STATE"), ("hidden", "SCRATCH"), ("actions", "SWAP")],
)
def test_only_input_windows_are_filled(name: str, word: str) -> None:
    session = make_session()
    with pytest.raises(RoleError, match=f"'{name}' is a {word} buffer"):
        session.fill(name, np.zeros(session.arena[name].shape, np.float32))


def test_noise_is_drawn_into_float_windows_only() -> None:
    with pytest.raises(WindowError, match="float32 windows only"):
        make_session().draw("tokens")


def test_unknown_names_are_named() -> None:
    session = make_session()
    with pytest.raises(ContractError, match="unknown buffer 'imag'; did you mean 'image'"):
        session.fill("imag", image(1))
    with pytest.raises(ContractError, match="unknown stage 'actin'"):
        session.replay("actin")
    with pytest.raises(
        UncapturedShapeError,
        match="shape 'huge' was not captured; captured at configure: short, long",
    ):
        session.select("huge")


def test_extents_stay_in_range() -> None:
    session = make_session()
    session.set_extent("rows", 6)
    assert session.extents == {"rows": 6}
    for value in (-1, 7):
        with pytest.raises(WindowError, match="expected 0 to 6"):
            session.set_extent("rows", value)


def test_a_stage_that_fails_is_replayed_again_with_all_that_follows() -> None:
    hot = False

    def fragile(buffers: Mapping[str, torch.Tensor], variant: Variant) -> None:
        BODIES["context"](buffers, variant)
        if hot:
            raise RuntimeError("half way")

    session = make_session(bodies={**BODIES, "context": fragile})
    session.act()
    hot = True
    session.fill("image", image(4))
    with pytest.raises(RuntimeError, match="half way"):
        session.act()
    with pytest.raises(StaleInputError):
        session.read("actions")
    hot = False
    assert session.act() == ("context", "action")


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
