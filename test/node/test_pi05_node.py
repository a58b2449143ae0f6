"""The node with the real pi05_tiny, from the example parameter file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import yaml

from flashrt_ros.msg import Refusal, StreamStatus
from flashrt_ros.node.policy_node import PolicyNode
from flashrt_ros.policies import PolicyRunner, build_policy
from flashrt_ros.policies.pi05.config import Pi05Config
from flashrt_ros.policies.pi05.lerobot_writer import write_checkpoint
from flashrt_ros.policies.pi05.presets import PRESETS, SEEDED_PRESETS
from flashrt_ros.policies.pi05.seeded import seeded_tensors
from flashrt_ros.policies.pixels import PixelOrder
from flashrt_ros.srv import Restore, Snapshot
from test.node.rig import Rig, record_chunks, record_errors, record_status
from test.node.robot import Robot, image_message
from test.sources import ROOT

TOKENIZER = SEEDED_PRESETS["pi05_tiny"].tokenizer
TINY = ROOT / "config" / "pi05_tiny.yaml"
POSITIONS = {
    "panda_joint1": 0.0, "panda_joint2": -0.785, "panda_joint3": 0.0, "panda_joint4": -2.1, "panda_joint5": 0.0,
    "panda_joint6": 1.9, "panda_joint7": 0.785, "panda_finger_joint1": 0.02,
}  # fmt: skip
PICTURES = {
    view: np.random.default_rng(seed).integers(0, 256, (48, 64, 3), np.uint8)
    for seed, view in enumerate(("front", "wrist"))
}


def policy_settings() -> dict[str, Any]:
    """What the example file sets for the policy."""
    settings: dict[str, Any] = yaml.safe_load(TINY.read_text())["/**"]["ros__parameters"]["policy"]
    return {name: value for name, value in settings.items() if name != "name"}


def tiny_node(rig: Rig, changes: dict[str, Any] | None = None, file: Path = TINY) -> PolicyNode:
    defaults = {"warmup": 0, "status_period": 0.2, "max_age": 5.0, "instruction": "pick up the cup"}
    parameters = {**defaults, **(changes or {})}
    return rig.policy(parameters, cli_args=["--ros-args", "--params-file", str(file)])


def arm(rig: Rig) -> Robot:
    robot = Robot(rig, rate=20.0)
    for view, pixels in PICTURES.items():
        robot.camera(view, image_message(pixels))
    return robot.joints(dict(reversed(POSITIONS.items()))).start()


def write_poisoned_checkpoint(folder: Path) -> None:
    """The tiny preset's own weights, but for one bias of the last layer."""
    config = Pi05Config(**PRESETS["pi05_tiny"])
    tensors = seeded_tensors(config, SEEDED_PRESETS["pi05_tiny"].seed)
    tensors["action_out_proj.bias"][0] = float("nan")
    names = len(config.action_names)
    statistics = {"q01": np.full(names, -3, np.float32), "q99": np.full(names, 3, np.float32)}
    write_checkpoint(folder, config, tensors, statistics, statistics)


def test_chunks_are_those_of_the_policy_run_by_hand(rig: Rig) -> None:
    arm(rig)
    chunks, statuses = record_chunks(rig), record_status(rig)
    node = tiny_node(rig, {"seed": 7})
    assert node.transition("configure")
    assert node.transition("activate")
    chunk = chunks.next(timeout=60)[0]

    policy = build_policy("pi05", policy_settings())
    runner = PolicyRunner.start(policy, seed=7)
    for view, pixels in PICTURES.items():
        runner.set_image(view, pixels, PixelOrder.RGB)
    runner.set_state(np.array([POSITIONS[name] for name in policy.state_names], np.float32))
    runner.set_instruction("pick up the cup")
    expected = runner.decide().actions

    assert tuple(chunk.joint_names) == policy.action_names
    assert chunk.horizon == policy.chunk
    assert chunk.fingerprint == policy.contract.fingerprint
    # The first decision after configure: the noise is the seed's first.
    assert chunk.chunk_id == 1
    np.testing.assert_array_equal(np.reshape(chunk.data, expected.shape), expected)
    status = statuses.wait_for(lambda m: m.chunks_published >= 1, "a status after the first chunk")
    assert status.policy == "pi05"
    assert status.checkpoint == "preset:pi05_tiny"
    assert status.plan == "split"
    assert status.stale_replays == 0
    assert status.bytes_copied_per_frame == 48 * 64 * 3
    assert all(stream.state == StreamStatus.OK for stream in status.streams)


def test_an_unchanged_picture_is_not_copied_again_and_its_stage_not_replayed(rig: Rig) -> None:
    robot = arm(rig)
    chunks, statuses = record_chunks(rig), record_status(rig)
    node = tiny_node(rig, {"max_age": 60.0, "rate_hz": 20.0})
    assert node.transition("configure")
    assert node.transition("activate")
    chunks.next(timeout=60)
    robot.stop()
    chunks.next(3, timeout=60)
    before = statuses.next()[0]
    chunks.next(3, timeout=60)
    after = statuses.next()[0]
    replays = {s.name: (b.replays, s.replays) for b, s in zip(before.stages, after.stages, strict=True)}
    assert replays["action"][1] > replays["action"][0]
    assert replays["context"][1] == replays["context"][0]


def test_after_a_restore_the_frames_are_copied_again_although_no_new_one_came(rig: Rig) -> None:
    """What a capsule brought back was computed from its own frames, and a chunk must not pass it off as the newest."""
    robot = arm(rig)
    chunks, statuses = record_chunks(rig), record_status(rig)
    node = tiny_node(rig, {"max_age": 60.0, "rate_hz": 20.0})
    assert node.transition("configure")
    assert node.transition("activate")
    chunks.next(timeout=60)
    assert rig.call(Snapshot, "snapshot", Snapshot.Request(name="early", replace=True)).result.cause == 0
    for view, pixels in PICTURES.items():
        robot.sensors[view].message = image_message(255 - pixels)
    chunks.next(3, timeout=60)
    robot.stop()
    last = chunks.next(3, timeout=60)[-1]
    before = statuses.next()[0]
    assert rig.call(Restore, "restore", Restore.Request(name="early")).result.cause == 0
    after = chunks.wait_for(lambda m: m.capsule == "early", "a chunk that continues from the capsule")
    assert after.oldest_observation_stamp == last.oldest_observation_stamp
    status = statuses.wait_for(lambda m: m.chunks_published >= after.chunk_id, "a status after that chunk")
    replays = {s.name: s.replays - b.replays for b, s in zip(before.stages, status.stages, strict=True)}
    assert replays["context"] >= 1


def test_nan_in_the_weights_drops_every_chunk(rig: Rig, tmp_path: Path) -> None:
    """A checkpoint whose last layer is NaN loads; nothing of it reaches a robot."""
    write_poisoned_checkpoint(tmp_path)
    arm(rig)
    chunks, statuses = record_chunks(rig), record_status(rig)
    # As the checkpoint says of itself.
    trained = {"policy.state_in_prompt": True, "policy.tokenizer": str(TOKENIZER)}
    node = tiny_node(rig, {"policy.checkpoint": str(tmp_path), **trained})
    assert node.transition("configure")
    assert node.transition("activate")
    statuses.wait_for(lambda m: Refusal.NOT_FINITE in {r.cause for r in m.chunk_refusals}, "NaN is refused", timeout=60)
    assert not len(chunks)


def test_the_example_for_the_true_size_fails_because_the_checkpoint_is_not_set(rig: Rig) -> None:
    errors = record_errors(rig)
    node = tiny_node(rig, {"device": "cpu"}, ROOT / "config" / "pi05.yaml")
    assert not node.transition("configure")
    text = errors.wait_for(lambda m: m.msg.startswith("configure failed: "), "the reason is logged").msg
    assert "checkpoint" in text
    assert "\n" not in text


def test_a_misspelt_setting_of_the_policy_is_named_with_the_nearest(rig: Rig) -> None:
    errors = record_errors(rig)
    node = tiny_node(rig, {"policy.chunks": 8})
    assert not node.transition("configure")
    text = errors.wait_for(lambda m: "'chunks'" in m.msg, "the setting is named").msg
    assert "chunk" in text
    assert "\n" not in text
