"""Replacing a capsule and handing out memory: what must stay true however fast it is."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
import torch

from flashrt_ros.engine import CapsuleStore, Session, Tier, UnknownCapsuleError
from flashrt_ros.engine.copier import RegionCopier
from flashrt_ros.engine.slab import FreeList, Slab

from ..contract.builders import make_contract
from .toy import BODIES, image, tokens


def session_with(device_pieces: int, host_pieces: int) -> Session:
    """A toy capsule takes one 256-byte piece of a tier."""
    store = CapsuleStore(torch.device("cpu"), device_pieces * 256, host_pieces * 256)
    session = Session(make_contract(), BODIES, capsules=store)
    session.configure()
    session.fill("image", image(1))
    session.fill("tokens", tokens(5, 6, 7, 8))
    session.set_extent("rows", 6)
    session.draw()
    session.act()
    return session


@pytest.mark.parametrize(("device", "host", "tier"), [(1, 0, Tier.DEVICE), (0, 1, Tier.HOST)])
def test_a_replaced_capsule_needs_no_room_beside_it(device: int, host: int, tier: Tier) -> None:
    session = session_with(device, host)
    session.snapshot("a", keep=True)
    session.fill("image", image(9))
    session.act()
    bits = session.read("kv").tobytes()
    session.capsules.require_room("a", session.capsules.get("a").nbytes, replace=True)
    assert session.snapshot("a", replace=True).tier is tier
    assert session.capsules.used(tier) == 256
    session.fill("image", image(3))
    session.act()
    session.restore("a")
    assert session.arena["kv"].numpy().tobytes() == bits


def test_a_replaced_capsule_becomes_the_most_recently_used() -> None:
    session = session_with(2, 0)
    for name in ("a", "b"):
        session.snapshot(name)
    session.snapshot("a", replace=True)
    session.snapshot("c")
    assert [capsule.name for capsule in session.capsules.list()] == ["a", "c"]


def test_a_restored_capsule_becomes_the_most_recently_used() -> None:
    session = session_with(2, 0)
    for name in ("a", "b"):
        session.snapshot(name)
    session.restore("a")
    session.snapshot("c")
    assert [capsule.name for capsule in session.capsules.list()] == ["a", "c"]


def test_a_snapshot_that_breaks_off_leaves_neither_a_torn_capsule_nor_a_taken_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = session_with(2, 0)
    session.snapshot("a")

    def broken(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RegionCopier, "gather", broken)
        with pytest.raises(KeyboardInterrupt):
            session.snapshot("b")
        assert session.capsules.used(Tier.DEVICE) == 256
        with pytest.raises(KeyboardInterrupt):
            session.snapshot("a", replace=True)
    assert (len(session.capsules), session.capsules.used(Tier.DEVICE)) == (0, 0)
    session.snapshot("a")  # and the session may be driven again


def test_a_demoted_capsule_that_is_replaced_comes_back_to_the_device() -> None:
    session = session_with(1, 1)
    session.snapshot("a")
    session.snapshot("b")
    assert session.capsules.get("a").tier is Tier.HOST
    assert session.snapshot("a", replace=True).tier is Tier.DEVICE


def test_a_replacement_that_breaks_off_leaves_no_torn_capsule() -> None:
    session = session_with(1, 0)
    nbytes = session.snapshot("a").nbytes

    def torn(block: torch.Tensor, tier: Tier) -> object:
        block[:8] = 255
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.capsules.add("a", nbytes, torn, replace=True)  # type: ignore[arg-type]
    with pytest.raises(UnknownCapsuleError):
        session.restore("a")
    assert session.capsules.used(Tier.DEVICE) == 0


def test_free_bytes_are_always_the_complement_of_the_taken_ones() -> None:
    draw, free = random.Random(3), FreeList(64 * 256)
    for _ in range(3000):
        if free.taken and draw.random() < 0.5:
            free.give_back(draw.choice(list(free.taken)))
        else:
            free.take(draw.randint(0, 6 * 256))
        spans = sorted([(start, size, True) for start, size in free.taken.items()] + [(*h, False) for h in free._holes])
        assert [start for start, _, _ in spans] == [0, *np.cumsum([size for _, size, _ in spans])[:-1]]
        assert sum(size for _, size, _ in spans) == free.nbytes
        holes = [not taken for _, _, taken in spans]
        assert not any(one and two for one, two in pairwise(holes)), "neighbouring holes are one"


def test_a_piece_of_another_size_at_the_same_place_has_its_own_size() -> None:
    slab = Slab(1024, torch.device("cpu"))
    for nbytes in (100, 300, 100):
        piece = slab.take(nbytes)
        assert piece is not None
        assert (piece.numel(), slab.offset(piece)) == (nbytes, 0)
        slab.give_back(piece)
