"""The session replays exactly what is stale and refuses everything that would use old data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from flashrt_ros.contract import (
    ContractError,
    Variant,
)
from flashrt_ros.engine import (
    BusyError,
    RoleError,
    Session,
    StaleInputError,
    StaleVariantError,
    UncapturedShapeError,
    UnfilledWindowError,
    WindowError,
)

from ..contract.builders import make_contract
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


def test_a_window_whose_filling_broke_off_is_not_read_until_it_is_filled_again() -> None:
    session = make_session()
    session.act()
    with pytest.raises(ZeroDivisionError), session.window("image") as view:
        view[0] = 1 // 0
    with pytest.raises(UnfilledWindowError, match="'context' needs windows .*: image"):
        session.act()
    session.fill("image", image(2))
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


def test_equal_content_numbers_mean_equal_bytes() -> None:
    session = make_session()
    session.act()
    session.snapshot("here")
    before = {name: session.content(name) for name in session.arena}
    session.fill("tokens", tokens(9, 9, 9, 9))
    assert session.content("tokens") != before["tokens"]
    assert session.content("image") == before["image"]
    session.act()
    assert session.content("kv") != before["kv"]
    session.restore("here")
    assert session.content("kv") == before["kv"]
    assert make_session().content("kv") not in before.values()
    with pytest.raises(ContractError, match="unknown buffer 'token'; did you mean 'tokens'"):
        session.content("token")


def test_a_window_that_is_being_filled_keeps_others_out_until_it_ends() -> None:
    session = make_session()
    with session.window("image"):
        with pytest.raises(BusyError, match="cannot fill 'tokens'"), session.window("tokens"):
            raise AssertionError("the block must not run")
        with pytest.raises(BusyError, match="cannot read 'noise'"):
            session.read("noise")
    session.fill("tokens", tokens(1, 2, 3, 4))
