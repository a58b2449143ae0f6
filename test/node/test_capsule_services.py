"""The capsule services of a node that runs the real pi05_tiny, over real DDS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flashrt_ros.msg import Capsule, CapsuleResult
from flashrt_ros.node.services import CAUSES
from flashrt_ros.srv import DropCapsule, Fork, ListCapsules, Restore, Snapshot
from test.node.rig import Recorder, Rig, record_chunks, record_status
from test.node.robot import Robot
from test.node.test_pi05_node import arm, tiny_node

CUP, PLATE = "pick up the cup", "put it on the plate"


class Scene:
    """An active node, its robot, and short ways to call the services."""

    def __init__(self, rig: Rig, folder: Path, **changes: Any) -> None:
        self.rig, self.folder = rig, folder
        self.robot: Robot = arm(rig)
        self.chunks: Recorder = record_chunks(rig)
        parameters = {"capsules.folder": str(folder), "instruction": CUP, **changes}
        self.node = tiny_node(rig, parameters)
        assert self.node.transition("configure")

    def activate(self) -> Scene:
        assert self.node.transition("activate")
        self.chunks.next(timeout=60)
        return self

    def snapshot(self, name: str, **fields: Any) -> Any:
        return self.rig.call(Snapshot, "snapshot", Snapshot.Request(name=name, **fields), retry=False)

    def restore(self, name: str, **fields: Any) -> Any:
        return self.rig.call(Restore, "restore", Restore.Request(name=name, **fields), retry=False)

    def fork(self, **fields: Any) -> Any:
        return self.rig.call(Fork, "fork", Fork.Request(**fields), retry=False)

    def drop(self, name: str, **fields: Any) -> Any:
        return self.rig.call(DropCapsule, "policy/drop_capsule", DropCapsule.Request(name=name, **fields), retry=False)

    def list(self) -> Any:
        return self.rig.call(ListCapsules, "policy/list_capsules", ListCapsules.Request(), retry=False)

    def follow(self, instruction: str) -> Any:
        """Tell an instruction and wait for a chunk that follows it."""
        self.robot.tell(instruction)
        return self.chunks.wait_for(lambda m: m.instruction == instruction, instruction, start=len(self.chunks))


@pytest.fixture
def scene(rig: Rig, tmp_path: Path) -> Scene:
    return Scene(rig, tmp_path / "capsules").activate()


def test_a_restore_begins_an_epoch_whose_chunks_name_the_capsule_and_follow_its_instruction(scene: Scene) -> None:
    saved = scene.snapshot("cup", description="before the plate")
    assert saved.result.cause == CapsuleResult.SUCCESS, saved.result.message
    plate = scene.follow(PLATE)
    assert plate.capsule == ""
    restored = scene.restore("cup")
    assert restored.result.cause == CapsuleResult.SUCCESS, restored.result.message
    assert restored.epoch > plate.epoch
    chunk = scene.chunks.wait_for(lambda m: m.epoch >= restored.epoch, "a chunk of the new epoch")
    assert (chunk.epoch, chunk.capsule, chunk.instruction) == (restored.epoch, "cup", CUP)
    again = scene.follow(PLATE)
    assert again.capsule == ""
    assert again.epoch > restored.epoch


def test_a_capsule_is_described_and_the_status_counts_it(scene: Scene) -> None:
    status = record_status(scene.rig)
    saved = scene.snapshot("cup", description="before the plate", keep=True).capsule
    listed = scene.list()
    assert [c.name for c in listed.capsules] == ["cup"]
    assert listed.capsules[0] == saved
    assert (saved.description, saved.instruction, saved.session) == ("before the plate", CUP, "main")
    assert saved.keep
    assert saved.compatible
    assert not saved.durable
    assert saved.tier == Capsule.DEVICE
    assert saved.fingerprint == scene.chunks.messages[-1].fingerprint
    assert saved.chunk_id >= 1
    assert saved.epoch == scene.chunks.messages[-1].epoch
    assert 0 < saved.bytes <= listed.device_bytes <= listed.budget_bytes
    told = status.wait_for(lambda m: m.capsule_count == 1, "a status with one capsule")
    assert told.capsule_device_bytes == listed.device_bytes


def test_a_durable_capsule_survives_the_node(rig: Rig, scene: Scene) -> None:
    assert scene.snapshot("cup", durable=True).capsule.durable
    assert scene.node.transition("deactivate")
    assert scene.node.transition("cleanup")
    assert scene.node.transition("configure")
    scene.node.set_parameters([rig.parameter("instruction", PLATE)])
    scene.activate()
    listed = scene.list()
    assert [(c.name, c.tier, c.instruction) for c in listed.capsules] == [("cup", Capsule.DISK, CUP)]
    assert listed.disk_bytes > listed.device_bytes == 0
    scene.follow(PLATE)
    restored = scene.restore("cup")
    assert restored.result.cause == CapsuleResult.SUCCESS, restored.result.message
    chunk = scene.chunks.wait_for(lambda m: m.epoch >= restored.epoch, "a chunk of the new epoch")
    assert (chunk.capsule, chunk.instruction) == ("cup", CUP)
    assert scene.drop("cup").freed_bytes > 0
    assert scene.list().capsules == []


def test_a_fork_decides_on_its_own_and_the_first_session_can_be_brought_back(scene: Scene) -> None:
    scene.snapshot("cup")
    forked = scene.fork(name="cup", session="other", switch_to=True)
    assert forked.result.cause == CapsuleResult.SUCCESS, forked.result.message
    chunk = scene.chunks.wait_for(lambda m: m.epoch >= forked.epoch, "a chunk of the fork")
    assert (chunk.session, chunk.capsule, chunk.instruction) == ("other", "cup", CUP)
    assert scene.follow(PLATE).session == "other"
    back = scene.restore("cup", session="main")
    chunk = scene.chunks.wait_for(lambda m: m.epoch >= back.epoch, "a chunk of the first session")
    assert (chunk.session, chunk.instruction) == ("main", CUP)


def test_a_fork_of_the_live_state_waits_until_it_is_asked_for(scene: Scene) -> None:
    epoch = scene.chunks.messages[-1].epoch
    forked = scene.fork(session="aside")
    assert (forked.result.cause, forked.epoch) == (CapsuleResult.SUCCESS, 0)
    chunk = scene.chunks.next()[0]
    assert (chunk.session, chunk.epoch) == ("main", epoch)


def test_wrong_requests_have_their_own_causes_and_change_nothing(scene: Scene) -> None:
    scene.snapshot("kept", keep=True)
    before, epoch = scene.list(), scene.chunks.messages[-1].epoch
    refused = [
        (scene.snapshot("../x"), CapsuleResult.BAD_NAME),
        (scene.restore("../x"), CapsuleResult.BAD_NAME),
        (scene.drop("a/b"), CapsuleResult.BAD_NAME),
        (scene.fork(session="../x"), CapsuleResult.BAD_NAME),
        (scene.restore("nothing"), CapsuleResult.UNKNOWN_NAME),
        (scene.fork(name="nothing", session="x"), CapsuleResult.UNKNOWN_NAME),
        (scene.drop("nothing"), CapsuleResult.UNKNOWN_NAME),
        (scene.snapshot("kept"), CapsuleResult.ALREADY_EXISTS),
        (scene.fork(session="main"), CapsuleResult.ALREADY_EXISTS),
        (scene.drop("kept"), CapsuleResult.KEPT),
        (scene.snapshot("new", session="ghost"), CapsuleResult.UNKNOWN_SESSION),
        (scene.restore("kept", session="ghost"), CapsuleResult.UNKNOWN_SESSION),
    ]
    for response, cause in refused:
        assert response.result.cause == cause, response.result.message
        assert response.result.message
    assert scene.list() == before
    chunk = scene.chunks.next()[0]
    assert (chunk.epoch, chunk.session) == (epoch, "main")


def test_full_budgets_and_full_houses_are_refused(rig: Rig, tmp_path: Path) -> None:
    changes = {"capsules.device_mib": 0, "capsules.host_mib": 0, "capsules.sessions": 1}
    scene = Scene(rig, tmp_path, **changes).activate()
    assert scene.snapshot("cup").result.cause == CapsuleResult.BUDGET_FULL
    assert scene.snapshot("cup", durable=True).result.cause == CapsuleResult.BUDGET_FULL
    assert not list(tmp_path.iterdir())
    assert scene.fork(session="other").result.cause == CapsuleResult.TOO_MANY_SESSIONS
    scene.chunks.next()


def test_an_inactive_node_saves_and_restores_nothing(rig: Rig, tmp_path: Path) -> None:
    scene = Scene(rig, tmp_path)
    assert scene.snapshot("cup").result.cause == CapsuleResult.INACTIVE
    assert scene.fork(session="other").result.cause == CapsuleResult.INACTIVE
    scene.activate()
    scene.snapshot("cup")
    assert scene.node.transition("deactivate")
    assert scene.restore("cup").result.cause == CapsuleResult.INACTIVE
    assert [c.name for c in scene.list().capsules] == ["cup"]


def test_nothing_is_saved_before_the_first_decision(rig: Rig, tmp_path: Path) -> None:
    scene = Scene(rig, tmp_path, instruction="")
    assert scene.node.transition("activate")
    assert scene.snapshot("cup").result.cause == CapsuleResult.NOTHING_TO_SAVE


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (lambda data: data[:-1], CapsuleResult.FILE_CORRUPT),
        (lambda data: data[:-40] + bytes([data[-40] ^ 1]) + data[-39:], CapsuleResult.FILE_CORRUPT),
        (lambda data: b"not a capsule at all", CapsuleResult.FILE_FOREIGN),
    ],
)
def test_damaged_files_are_refused_and_listed_as_they_are(scene: Scene, damage: Any, cause: int) -> None:
    scene.snapshot("cup", durable=True)
    file = next(scene.folder.iterdir())
    damaged = file.with_name(file.name.replace("cup", "bad"))
    damaged.write_bytes(damage(file.read_bytes()))
    assert scene.restore("bad").result.cause == cause
    assert {c.name for c in scene.list().capsules} == {"bad", "cup"}
    scene.chunks.next()


def test_a_file_of_another_configuration_is_refused_with_the_fields(scene: Scene) -> None:
    scene.snapshot("cup", durable=True)
    assert scene.node.transition("deactivate")
    assert scene.node.transition("cleanup")
    scene.node.set_parameters([scene.rig.parameter("policy.chunk", 8)])
    assert scene.node.transition("configure")
    scene.activate()
    assert not scene.list().capsules[0].compatible
    response = scene.restore("cup")
    assert response.result.cause == CapsuleResult.FINGERPRINT_MISMATCH, response.result.message
    assert "chunk" in response.differing_fields
    assert "chunk" in response.result.message


def test_a_folder_that_cannot_be_written(rig: Rig) -> None:
    scene = Scene(rig, Path("/sys/flashrt_ros_capsules")).activate()
    response = scene.snapshot("cup", durable=True)
    assert response.result.cause == CapsuleResult.READ_ONLY, response.result.message
    assert scene.list().capsules == []


def test_every_cause_is_one_of_the_interface_and_each_error_has_its_own_row() -> None:
    constants = [getattr(CapsuleResult, name) for name in dir(CapsuleResult) if name.isupper()]
    assert all(cause in constants for _, cause in CAUSES)
    kinds = [kind for kind, _ in CAUSES]
    assert len(set(kinds)) == len(kinds)
    for index, kind in enumerate(kinds):
        assert not any(issubclass(kind, earlier) for earlier in kinds[:index]), f"{kind.__name__} is never reached"
