"""The payload of a capsule file: read and digested in pieces, by whoever comes, in the size that the file names."""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flashrt_ros.contract import Buffer, DType, Extent, Region, Role
from flashrt_ros.engine import CapsuleFileError, CapsuleFolder, Session, crew
from flashrt_ros.engine.noise import state_bytes
from flashrt_ros.engine.payload import LEAST_PIECE, PIECE, PayloadReading, digest

from ..contract.builders import BUFFERS, REGIONS, make_contract, replaced
from .test_durable import rewrite_manifest, saved
from .toy import BODIES


@pytest.fixture
def folder(tmp_path: Path) -> CapsuleFolder:
    return CapsuleFolder(tmp_path / "capsules")


def test_reading_goes_on_when_no_helper_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "_crew", lambda: SimpleNamespace(size=4, call=lambda help_out: None))
    data = np.arange(3 * PIECE, dtype=np.uint32).view(np.uint8)
    (tmp_path / "file").write_bytes(data.tobytes())
    with (
        open(tmp_path / "file", "rb", buffering=0) as file,
        PayloadReading(file.fileno(), 0, len(data) - 40, 40) as payload,
    ):
        payload.finish_reading()
        found = payload.digest()
    assert found == _digest_in_turn(data[:-40], data[-40:], PIECE)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("block_bytes", [0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 17])
def test_what_is_read_has_the_digest_of_what_was_written(tmp_path: Path, block_bytes: int, at_once: bool) -> None:
    data = np.random.default_rng(0).integers(0, 256, block_bytes + 40, np.uint8)
    block, generator = data[:block_bytes], data[block_bytes:]
    (tmp_path / "file").write_bytes(b"header" + data.tobytes())
    with (
        open(tmp_path / "file", "rb", buffering=0) as file,
        PayloadReading(file.fileno(), len(b"header"), block_bytes, 40) as payload,
    ):
        if at_once:
            payload.finish_reading()
        found = payload.digest()
        in_others = payload.digest(LEAST_PIECE)
    assert found == digest(block, generator) == _digest_in_turn(block, generator, PIECE)
    assert in_others == digest(block, generator, LEAST_PIECE) == _digest_in_turn(block, generator, LEAST_PIECE)
    np.testing.assert_array_equal(np.concatenate([payload.block, payload.generator]), data)


def _digest_in_turn(block: np.ndarray, generator: np.ndarray, size: int) -> str:
    pieces = [block[start : start + size] for start in range(0, len(block), size)] + [generator]
    return hashlib.sha256(b"".join(hashlib.sha256(piece.tobytes()).digest() for piece in pieces)).hexdigest()


@pytest.mark.parametrize("at_once", [False, True])
def test_a_file_that_becomes_shorter_while_it_is_read_is_an_error(tmp_path: Path, at_once: bool) -> None:
    (tmp_path / "file").write_bytes(bytes(100))
    with (
        open(tmp_path / "file", "rb", buffering=0) as file,
        PayloadReading(file.fileno(), 0, 150, 50) as payload,
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


def wide(folder: CapsuleFolder) -> tuple[torch.Tensor, Path]:
    """The bytes of a capsule of several pieces, and its file."""
    kv = Buffer("kv", (2, 6, 3 << 15), DType.FLOAT32, Role.STATE)
    region = Region("kv", "kv", 0, kv.nbytes, blocks=2, live="rows")
    contract = make_contract(
        buffers=replaced(BUFFERS, "kv", kv), regions=replaced(REGIONS, "kv", region), extents=(Extent("rows", 6),)
    )
    session = Session(contract, dict.fromkeys(BODIES, lambda buffers, variant: None))
    session.configure()
    session.set_extent("rows", 6)
    capsule = session.capture("task")
    assert capsule.nbytes > 4 * PIECE
    capsule.block.random_(generator=torch.Generator().manual_seed(3))
    return capsule.block, folder.save(capsule)


@pytest.mark.parametrize("size", [LEAST_PIECE, 640 << 10, PIECE, 1 << 21, 1 << 40])
def test_a_file_is_digested_in_pieces_of_the_size_that_it_was_written_with(folder: CapsuleFolder, size: int) -> None:
    block, path = wide(folder)
    rewrite_manifest(path, {"sha256": _payload_digest(path, size), "sha256_piece_bytes": size})
    assert folder.load("task").block.equal(block)
    whole = bytearray(path.read_bytes())
    whole[-PIECE] ^= 1
    path.write_bytes(whole)
    with pytest.raises(CapsuleFileError, match="the payload was altered"):
        folder.load("task")


def test_the_file_says_which_size_its_pieces_have(folder: CapsuleFolder) -> None:
    _, path = wide(folder)
    manifest = _manifest(path)
    assert manifest["sha256_piece_bytes"] == PIECE
    assert manifest["sha256"] == _payload_digest(path, PIECE)


@pytest.mark.parametrize("size", [0, -1, -PIECE, 1, LEAST_PIECE - 1, True, None, 1048576.0, "1048576", [1048576]])
def test_pieces_of_no_sensible_size_are_refused(folder: CapsuleFolder, size: object) -> None:
    _, path = saved(folder)
    rewrite_manifest(path, {"sha256_piece_bytes": size})
    with pytest.raises(CapsuleFileError, match="a size is a whole number from 65536") as caught:
        folder.load("task")
    assert caught.value.field == "sha256_piece_bytes"


@pytest.mark.parametrize("size", [LEAST_PIECE, PIECE + 1, 1 << 80])
def test_another_size_than_that_of_the_digest_is_noticed(folder: CapsuleFolder, size: int) -> None:
    _, path = wide(folder)
    rewrite_manifest(path, {"sha256_piece_bytes": size})
    with pytest.raises(CapsuleFileError) as caught:
        folder.load("task")
    assert caught.value.field == "sha256"


def _manifest(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    return dict(json.loads(header["__metadata__"]["manifest"]))


def _payload_digest(path: Path, size: int) -> str:
    """SHA-256 over those of pieces of `size` bytes and of the generator's state, one after the other."""
    data = path.read_bytes()
    payload = data[8 + struct.unpack("<Q", data[:8])[0] :]
    block, generator = payload[: -state_bytes()], payload[-state_bytes() :]
    pieces = [*(block[start : start + size] for start in range(0, len(block), size)), generator]
    return hashlib.sha256(b"".join(hashlib.sha256(piece).digest() for piece in pieces)).hexdigest()
