"""Replacing a capsule, handing out memory, and the digest of a file: what must stay true however fast it is."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from flashrt_ros.engine import CapsuleStore, Session, Tier, UnknownCapsuleError
from flashrt_ros.engine.payload import PIECE, PayloadReading, digest
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


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("block_bytes", [0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 17])
def test_what_is_read_has_the_digest_of_what_was_written(tmp_path: Path, block_bytes: int, at_once: bool) -> None:
    data = np.random.default_rng(0).integers(0, 256, block_bytes + 40, np.uint8)
    block, generator = data[:block_bytes], data[block_bytes:]
    (tmp_path / "file").write_bytes(b"header" + data.tobytes())
    with (
        open(tmp_path / "file", "rb", buffering=0) as file,
        PayloadReading(file, len(b"header"), block_bytes, 40) as payload,
    ):
        if at_once:
            payload.finish_reading()
        found = payload.digest()
    pieces = [block[start : start + PIECE] for start in range(0, block_bytes, PIECE)] + [generator]
    assert found == digest(block, generator)
    assert found == hashlib.sha256(b"".join(hashlib.sha256(piece.tobytes()).digest() for piece in pieces)).hexdigest()
    np.testing.assert_array_equal(np.concatenate([payload.block, payload.generator]), data)


@pytest.mark.parametrize("at_once", [False, True])
def test_a_file_that_becomes_shorter_while_it_is_read_is_an_error(tmp_path: Path, at_once: bool) -> None:
    (tmp_path / "file").write_bytes(bytes(100))
    with (
        open(tmp_path / "file", "rb", buffering=0) as file,
        PayloadReading(file, 0, 150, 50) as payload,
    ):
        if at_once:
            payload.finish_reading()
        with pytest.raises(OSError, match="became shorter while it was read, at byte 100"):
            payload.digest()


_FORK = """
import os, signal
import numpy as np
from flashrt_ros.engine.payload import PIECE, digest
data = np.zeros(2 * PIECE, np.uint8)
expected = digest(data, data[:5])  # the parent's threads run now
child = os.fork()
if child == 0:
    signal.alarm(30)  # a child that hangs must not outlive the test
    os._exit(digest(data, data[:5]) != expected)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_digests_with_threads_of_its_own() -> None:
    subprocess.run([sys.executable, "-c", _FORK], check=True, timeout=60)
