"""A capsule on disk comes back in a new process with equal bits, or is refused with the field that is wrong."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from flashrt_ros.engine import (
    CapsuleFileError,
    CapsuleFolder,
    CapsuleStorageError,
    DiskFullError,
    FingerprintError,
    ForeignFileError,
    ReadOnlyError,
    Session,
    UnfilledWindowError,
    UnknownCapsuleError,
)
from flashrt_ros.engine.durable import save_capsule, storage_error

from ..contract.builders import IDENTITY, make_contract
from .test_capsules import acted, continuation
from .toy import BODIES, tokens

_CONTINUE = """
import sys
from pathlib import Path
from flashrt_ros.engine import CapsuleFolder
from test.engine.test_capsules import continuation
from test.engine.toy import make_session
session = make_session(seed=123)
session.capsules.insert(CapsuleFolder(Path(sys.argv[1])).load("task"))
session.restore("task")
assert session.notes == {"instruction": "pick"}
sys.stdout.write(continuation(session).hex())
"""


@pytest.fixture
def folder(tmp_path: Path) -> CapsuleFolder:
    return CapsuleFolder(tmp_path / "capsules")


def saved(folder: CapsuleFolder) -> tuple[Session, Path]:
    session = acted(seed=6)
    session.notes["instruction"] = "pick"
    return session, folder.save(session.snapshot("task", description="before the pick", keep=True))


def test_a_new_process_continues_with_equal_bits(folder: CapsuleFolder) -> None:
    session, _ = saved(folder)
    done = subprocess.run([sys.executable, "-c", _CONTINUE, folder.path], capture_output=True, text=True, check=True)
    assert done.stdout == continuation(session).hex()


def test_description_and_flags_survive(folder: CapsuleFolder) -> None:
    saved(folder)
    capsule = folder.load("task")
    assert (capsule.name, capsule.description, capsule.keep) == ("task", "before the pick", True)
    assert capsule.notes == {"instruction": "pick"}


def test_a_file_is_described_without_reading_its_payload(folder: CapsuleFolder) -> None:
    session, path = saved(folder)
    described = folder.describe("task")
    assert (described.name, described.description, described.keep) == ("task", "before the pick", True)
    assert described.fingerprint == session.fingerprint
    assert described.nbytes == path.stat().st_size
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(CapsuleFileError):
        folder.describe("task")


def test_a_capsule_outside_the_store_is_the_one_inside(folder: CapsuleFolder) -> None:
    session = acted(seed=6)
    outside, inside = session.capture("task"), session.snapshot("task")
    assert outside.block.equal(inside.block)
    folder.save(outside)
    uninterrupted = continuation(session)
    session.adopt(folder.load("task"))
    session.fill("tokens", tokens(5, 6, 7, 8))
    assert continuation(session) == uninterrupted


def test_windows_that_awaited_filling_still_do_after_loading(folder: CapsuleFolder) -> None:
    session = acted()
    with pytest.raises(ZeroDivisionError), session.window("image") as view:
        view[0] = 1 // 0
    folder.save(session.snapshot("torn"))
    assert folder.load("torn").state.unfilled == {"image"}


def test_windows_that_were_never_filled_need_it_whatever_the_file_says(folder: CapsuleFolder) -> None:
    session, path = saved(folder)
    rewrite_manifest(path, {"versions": {**session.versions, "noise": 0}, "unfilled": ["nothing"]})
    assert folder.load("task").state.unfilled == {"noise"}


def test_windows_that_are_not_in_the_file_must_be_filled_again(folder: CapsuleFolder) -> None:
    saved(folder)
    session = acted()
    session.capsules.insert(folder.load("task"))
    session.restore("task")
    assert session.unfilled == {"image", "noise", "tokens"}
    with pytest.raises(UnfilledWindowError, match="'action' needs windows .*: noise"):
        session.act()


def test_the_file_is_readable_by_the_safetensors_library(folder: CapsuleFolder) -> None:
    session, path = saved(folder)
    tensors = load_file(path)
    assert set(tensors) == {"region.kv", "region.prompt", "generator"}
    assert tensors["region.kv"].numpy().tobytes() == session.read("kv")[:, :4].tobytes()


def test_a_capsule_of_another_contract_is_refused_with_the_fields(folder: CapsuleFolder) -> None:
    saved(folder)
    changed = dataclasses.replace(IDENTITY, precision="fp8", architecture="sm_90a")
    other = Session(make_contract(identity=changed), BODIES)
    other.configure()
    other.capsules.insert(folder.load("task"))
    with pytest.raises(FingerprintError, match="these differ: precision, architecture"):
        other.restore("task")


def test_capsules_of_one_contract_share_it_and_those_of_another_do_not(folder: CapsuleFolder) -> None:
    session, _ = saved(folder)
    folder.save(session.snapshot("second"))
    assert folder.load("task").contract is folder.load("second").contract
    changed = make_contract(identity=dataclasses.replace(IDENTITY, precision="fp8"))
    other = Session(changed, BODIES)
    other.configure()
    folder.save(other.snapshot("third"))
    assert folder.load("third").contract == changed


def test_names_are_listed_and_deleted(folder: CapsuleFolder) -> None:
    assert folder.names() == ()
    session, path = saved(folder)
    folder.save(session.snapshot("another"))
    assert folder.names() == ("another", "task")
    assert folder.nbytes() > path.stat().st_size
    assert folder.delete("task") > 0
    assert folder.names() == ("another",)
    with pytest.raises(UnknownCapsuleError, match="no durable capsule is called 'task' in .*; there are: another"):
        folder.load("task")


class TestDamage:
    """Whatever is wrong with a file, it is refused by name, and never half used."""

    def test_every_truncation_is_refused(self, folder: CapsuleFolder) -> None:
        _, path = saved(folder)
        whole = path.read_bytes()
        for length in {0, 1, 7, 8, 9, len(whole) // 2, len(whole) - 1}:
            path.write_bytes(whole[:length])
            with pytest.raises(CapsuleFileError):
                folder.load("task")

    def test_extra_bytes_are_refused(self, folder: CapsuleFolder) -> None:
        _, path = saved(folder)
        path.write_bytes(path.read_bytes() + b"\0")
        with pytest.raises(CapsuleFileError) as caught:
            folder.load("task")
        assert caught.value.field == "regions"

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=120, deadline=None)
    @given(data=st.data())
    def test_every_flipped_bit_is_refused_or_harmless(self, folder: CapsuleFolder, data: st.DataObject) -> None:
        session, path = saved(folder) if not folder.names() else (None, folder.file_of("task"))
        whole = bytearray((path.with_suffix(".good") if session is None else path).read_bytes())
        path.with_suffix(".good").write_bytes(whole)
        reference = path.parent.joinpath("reference")
        if session is not None:
            reference.write_bytes(continuation(session))
        bit = data.draw(st.integers(0, len(whole) * 8 - 1))
        whole[bit // 8] ^= 1 << bit % 8
        path.write_bytes(whole)
        try:
            capsule = folder.load("task")
        except CapsuleFileError:
            return
        fresh = acted(seed=55)  # only a bit that means nothing (white space) may pass
        fresh.capsules.insert(capsule)
        fresh.restore("task")
        assert continuation(fresh) == reference.read_bytes()

    @pytest.mark.parametrize(
        ("field", "value", "error"),
        [
            ("schema", 2, ForeignFileError),
            ("format", "other", ForeignFileError),
            ("sha256", "00" * 32, CapsuleFileError),
            ("fingerprint", "00" * 32, CapsuleFileError),
            ("contract", "{}", CapsuleFileError),
            ("extents", {"rows": 3}, CapsuleFileError),
            ("extents", {}, CapsuleFileError),
            ("consumed", 3, CapsuleFileError),
        ],
    )
    def test_a_changed_manifest_is_refused_with_the_field(
        self, folder: CapsuleFolder, field: str, value: object, error: type[CapsuleFileError]
    ) -> None:
        _, path = saved(folder)
        rewrite_manifest(path, {field: value})
        with pytest.raises(error) as caught:
            folder.load("task")
        assert caught.value.field in (field, "manifest", "regions")

    @pytest.mark.parametrize("surplus", [b"\0" * 8, b""])
    def test_a_noise_state_of_another_size_is_refused(self, folder: CapsuleFolder, surplus: bytes) -> None:
        session, path = saved(folder)
        capsule = session.capsules.get("task")
        state = capsule.state.generator.numpy().tobytes()
        other = torch.frombuffer(bytearray(state + surplus if surplus else state[:-8]), dtype=torch.uint8)
        altered = dataclasses.replace(capsule, state=dataclasses.replace(capsule.state, generator=other))
        save_capsule(altered, path)
        with pytest.raises(CapsuleFileError, match=f"its {len(other)} bytes are no state of a generator") as caught:
            folder.load("task")
        assert caught.value.field == "generator"

    def test_a_manifest_altered_by_hand_is_noticed(self, folder: CapsuleFolder) -> None:
        _, path = saved(folder)
        path.write_bytes(path.read_bytes().replace(b"before the pick", b"before the kick"))
        with pytest.raises(CapsuleFileError, match="manifest was altered"):
            folder.load("task")

    @pytest.mark.parametrize("content", [b"", b"PK\3\4zip", b"\xff" * 64, struct.pack("<Q", 2) + b"{}"])
    def test_foreign_files(self, folder: CapsuleFolder, content: bytes) -> None:
        _, path = saved(folder)
        path.write_bytes(content)
        with pytest.raises(ForeignFileError):
            folder.load("task")

    def test_nothing_of_a_foreign_file_is_read_whatever_its_size(self, folder: CapsuleFolder) -> None:
        _, path = saved(folder)
        path.write_bytes(struct.pack("<Q", 2) + b"{}")
        os.truncate(path, 1 << 43)  # a hole; no machine has the memory for it
        with pytest.raises(ForeignFileError):
            folder.load("task")


class TestStorage:
    """The file system's refusals have their own kinds, and the old file stays."""

    @pytest.mark.parametrize(
        ("number", "kind"),
        [
            (errno.ENOSPC, DiskFullError),
            (errno.EDQUOT, DiskFullError),
            (errno.EROFS, ReadOnlyError),
            (errno.EACCES, ReadOnlyError),
            (errno.EIO, CapsuleStorageError),
        ],
    )
    def test_each_error_number_has_its_kind(self, number: int, kind: type[CapsuleStorageError]) -> None:
        assert type(storage_error(Path("x"), OSError(number, os.strerror(number)))) is kind

    def test_a_full_disk_keeps_the_old_file(self, folder: CapsuleFolder) -> None:
        if not Path("/dev/full").exists():
            pytest.skip("this system has no /dev/full")
        session, path = saved(folder)
        old = path.read_bytes()
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        temporary.symlink_to("/dev/full")  # every write to it answers ENOSPC, as a full disk does
        session.draw()
        with pytest.raises(DiskFullError, match="no space left"):
            folder.save(session.snapshot("task", replace=True))
        assert path.read_bytes() == old
        assert not temporary.is_symlink()

    def test_a_folder_below_a_file_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(CapsuleStorageError, match="Not a directory|File exists"):
            CapsuleFolder(tmp_path / "file").save(acted().snapshot("a"))


def test_a_kill_at_any_moment_leaves_the_old_file_or_the_new_one(folder: CapsuleFolder) -> None:
    """A process saves alternately two capsules under one name until it is killed; the file is always one of them."""
    code = """
import sys
from pathlib import Path
from flashrt_ros.engine import CapsuleFolder
from test.engine.test_capsules import acted
session, folder = acted(seed=6), CapsuleFolder(Path(sys.argv[1]))
capsules = [session.snapshot(name) for name in ("one", "two")]
for capsule in capsules:
    capsule.name = "task"
print("ready", flush=True)
while True:
    for capsule, description in zip(capsules, ("old", "new")):
        capsule.description = description
        folder.save(capsule)
"""
    for round_number in range(5):
        process = subprocess.Popen([sys.executable, "-c", code, folder.path], stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(0.02 + 0.013 * round_number)  # a different moment each round; any moment must do
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        if folder.names():
            assert folder.load("task").description in ("old", "new")
    assert folder.names() == ("task",)


def rewrite_manifest(path: Path, changes: dict[str, object]) -> None:
    """Change manifest fields and seal the manifest again, as a buggy or hostile writer would."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    manifest = {**json.loads(header["__metadata__"]["manifest"]), **changes}
    text = json.dumps(manifest, sort_keys=True)
    header["__metadata__"] = {"manifest": text, "manifest_sha256": hashlib.sha256(text.encode()).hexdigest()}
    new = json.dumps(header).encode()
    new += b" " * (-len(new) % 8)
    path.write_bytes(struct.pack("<Q", len(new)) + new + data[8 + length :])
