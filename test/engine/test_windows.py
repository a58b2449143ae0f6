"""How windows reach the stages, and filling some while the stages that need others run already."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flashrt_ros.contract import ContractError
from flashrt_ros.engine import DeviceError, RoleError, Session, WindowPath, choose_path, windows

from ..contract.builders import make_contract
from .toy import BODIES, expected, image, make_session, tokens

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("integrated", [False, True])
def test_windows_are_read_in_place_where_host_and_gpu_share_their_memory(
    integrated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "is_integrated", lambda device: integrated)
    assert choose_path(GPU) is (WindowPath.MAPPED if integrated else WindowPath.PINNED)
    for asked in (WindowPath.PINNED, WindowPath.MAPPED):
        assert choose_path(GPU, asked) is asked


def test_a_path_that_the_device_does_not_have_is_refused() -> None:
    with pytest.raises(DeviceError, match="windows cannot stay on the host for 'cuda:0'; ask for pinned or mapped"):
        choose_path(GPU, WindowPath.HOST)
    for asked in (WindowPath.PINNED, WindowPath.MAPPED):
        with pytest.raises(DeviceError, match=f"windows cannot be {asked} on 'cpu'"):
            Session(make_contract(), BODIES, windows=asked)


def test_the_path_is_told_for_windows_only() -> None:
    session = make_session()
    assert session.window_path("image") is WindowPath.HOST
    with pytest.raises(RoleError, match="'kv' is a STATE buffer, only SWAP buffers are windows"):
        session.window_path("kv")


def test_stages_that_a_window_does_not_feed_run_before_it_is_filled() -> None:
    session = Session(make_contract(), BODIES)
    session.configure()
    session.fill("image", image(3))
    session.fill("tokens", tokens(5, 6, 7, 8))
    assert session.act(apart_from="noise") == ("prompt", "context")
    assert session.act(apart_from="noise") == ()
    session.draw("noise")
    assert session.act() == ("action",)
    noise = session.read("noise")
    np.testing.assert_array_equal(session.read("actions"), expected(image(3), tokens(5, 6, 7, 8), noise))


def test_two_halves_of_a_decision_give_the_bits_of_a_whole_one() -> None:
    whole, halves = make_session(4), make_session(4)
    for step in range(3):
        for session in (whole, halves):
            session.fill("image", image(step))
        halves.act(apart_from="noise")
        for session in (whole, halves):
            session.draw()
            session.act()
        np.testing.assert_array_equal(whole.read("actions"), halves.read("actions"))
    assert whole.counts == halves.counts


def test_a_buffer_that_everything_follows_from_leaves_nothing_to_do() -> None:
    session = make_session()
    assert session.act(apart_from="tokens") == ()
    with pytest.raises(ContractError, match="unknown buffer 'nois'; did you mean 'noise'"):
        session.act(apart_from="nois")
