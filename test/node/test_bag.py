"""Observations out of real recordings, written here with rosbags and ROS's own serialiser."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rosbags", reason="rosbags is not installed")

from builtin_interfaces.msg import Time
from rclpy.serialization import serialize_message
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import Stores, get_typestore
from sensor_msgs.msg import Image, JointState
from std_msgs.msg import Header, String

from flashrt_ros.node.bag import BagOptions, read_bag, rgb
from flashrt_ros.node.frame import Frame
from flashrt_ros.policies.pixels import PixelOrder
from flashrt_ros.policies.samples import SampleError
from test.policies.pi05.tiny import STATE, frame, small_policy

POLICY = small_policy()
TOPICS = {
    "front": "front/image_raw",
    "wrist": "/cam/wrist",
    "joint_states": "joint_states",
    "instruction": "instruction",
}
STORE = get_typestore(Stores.ROS2_JAZZY)
SECOND = 10**9


@dataclass
class Recording:
    """What is written: (topic, time in seconds, message)."""

    messages: list[tuple[str, float, Any]] = field(default_factory=list)

    def write(self, path: Path, plugin: StoragePlugin = StoragePlugin.MCAP) -> Path:
        with Writer(path, version=9, storage_plugin=plugin) as writer:
            connections: dict[str, Any] = {}
            for topic, seconds, message in sorted(self.messages, key=lambda item: item[1]):
                kind = f"{type(message).__module__.split('.')[0]}/msg/{type(message).__name__}"
                if topic not in connections:
                    connections[topic] = writer.add_connection(topic, kind, typestore=STORE)
                writer.write(connections[topic], round(seconds * SECOND), serialize_message(message))
        return path


def image(pixels: np.ndarray, encoding: str = "rgb8") -> Image:
    height, width, channels = pixels.shape
    return Image(header=Header(stamp=Time(sec=1)), height=height, width=width, encoding=encoding,
                 step=width * channels, data=array("B", pixels.tobytes()))  # fmt: skip


def joints(names: tuple[str, ...] = POLICY.state_names, positions: Any = STATE) -> JointState:
    return JointState(name=[*names[::-1], "other"], position=[*map(float, positions[::-1]), 9.0])


def scene(seconds: int = 5) -> Recording:
    """Both cameras at 2 Hz, joints at 10 Hz, one instruction at the start and another at 2.1 s."""
    made = Recording([("/instruction", 0.0, String(data="fold the towel"))])
    made.messages.append(("/instruction", 2.1, String(data="open the drawer")))
    made.messages += [("/joint_states", 0.1 * i, joints()) for i in range(10 * seconds)]
    for i in range(2 * seconds):
        made.messages.append(("/front/image_raw", 0.5 * i + 0.05, image(frame(i))))
        made.messages.append(("/cam/wrist", 0.5 * i + 0.02, image(frame(100 + i)[:, :, ::-1], "bgr8")))
    return made


def without(recording: Recording, topic: str) -> Recording:
    return Recording([item for item in recording.messages if item[0] != topic])


@pytest.mark.parametrize("plugin", [StoragePlugin.MCAP, StoragePlugin.SQLITE3])
def test_a_moment_has_the_newest_of_everything(tmp_path: Path, plugin: StoragePlugin) -> None:
    samples = read_bag(scene().write(tmp_path / "bag", plugin), POLICY, BagOptions(TOPICS), 100)
    assert len(samples) == 5
    assert [sample.instruction for sample in samples] == ["fold the towel"] * 3 + ["open the drawer"] * 2
    for index, sample in enumerate(samples):
        assert np.array_equal(sample.images["front"], frame(2 * index))
        assert np.array_equal(sample.images["wrist"], frame(100 + 2 * index))
        assert sample.state is not None
        assert np.array_equal(sample.state, STATE)


def test_a_bare_mcap_file_is_read_too(tmp_path: Path) -> None:
    scene().write(tmp_path / "bag")
    (file,) = (tmp_path / "bag").glob("*.mcap")
    assert len(read_bag(file, POLICY, BagOptions(TOPICS), 100)) == 5


def test_moments_are_spaced_and_bounded(tmp_path: Path) -> None:
    path = scene().write(tmp_path / "bag")
    assert len(read_bag(path, POLICY, BagOptions(TOPICS, every=2.0), 100)) == 3
    assert len(read_bag(path, POLICY, BagOptions(TOPICS, every=0.0), 4)) == 4


def test_an_instruction_can_be_given_where_none_was_recorded(tmp_path: Path) -> None:
    path = without(scene(), "/instruction").write(tmp_path / "bag")
    samples = read_bag(path, POLICY, BagOptions(TOPICS, instruction="wipe the table"), 100)
    assert {sample.instruction for sample in samples} == {"wipe the table"}
    with pytest.raises(SampleError, match=r"no topic '/instruction' for instruction.*or give --instruction"):
        read_bag(path, POLICY, BagOptions(TOPICS), 100)


def test_what_is_too_old_is_not_used(tmp_path: Path) -> None:
    recording = without(scene(), "/cam/wrist")
    recording.messages.append(("/cam/wrist", 0.0, image(frame(1))))
    samples = read_bag(recording.write(tmp_path / "bag"), POLICY, BagOptions(TOPICS, every=0.0, max_age=0.6), 100)
    assert len(samples) == 2
    with pytest.raises(
        SampleError, match="no moment at which front, wrist, joint_states were all there.*missing: wrist"
    ):
        read_bag(tmp_path / "bag", POLICY, BagOptions(TOPICS, max_age=0.001), 100)


def renamed(recording: Recording) -> Recording:
    return Recording([("/somewhere" if topic == "/cam/wrist" else topic, *rest) for topic, *rest in recording.messages])


def swapped(recording: Recording, topic: str, change: Callable[[int], Any]) -> Recording:
    """The messages of `topic` replaced by `change` of their number."""
    count = iter(range(1000))
    return Recording([(t, s, change(next(count)) if t == topic else m) for t, s, m in recording.messages])


@pytest.mark.parametrize(
    ("recording", "said"),
    [
        (renamed(scene()), r"no topic '/cam/wrist' for wrist; it has: .*/somewhere.*--topic wrist=TOPIC"),
        (swapped(scene(), "/cam/wrist", lambda i: String(data="x")), "/cam/wrist' is std_msgs/msg/String, expected"),
        (swapped(scene(), "/joint_states", lambda i: joints(("a",) * 1, [0.0])), "joint state lacks 'panda_joint1'"),
        (swapped(scene(), "/front/image_raw", lambda i: image(frame(i, 80, 80))), "view 'front' is 80x80, more than"),
        (swapped(scene(), "/front/image_raw", lambda i: image(frame(i), "rgb16")), "encoding"),
    ],
    ids=["topic", "type", "joints", "size", "encoding"],
)  # fmt: skip
def test_a_recording_of_another_robot_is_refused(tmp_path: Path, recording: Recording, said: str) -> None:
    with pytest.raises(SampleError, match=said):
        read_bag(recording.write(tmp_path / "bag"), POLICY, BagOptions(TOPICS), 100)


def test_no_recording_and_a_damaged_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SampleError, match="cannot read recording"):
        read_bag(tmp_path / "none.mcap", POLICY, BagOptions(TOPICS), 100)
    scene().write(tmp_path / "bag")
    (file,) = (tmp_path / "bag").glob("*.mcap")
    file.write_bytes(b"no recording" * 100)
    with pytest.raises(SampleError, match="cannot read recording"):
        read_bag(file, POLICY, BagOptions(TOPICS), 100)


@pytest.mark.parametrize(("plugin", "files"), [(StoragePlugin.MCAP, "*.mcap"), (StoragePlugin.SQLITE3, "*.db3")])
def test_damage_anywhere_is_read_around_or_refused(tmp_path: Path, plugin: StoragePlugin, files: str) -> None:
    (file,) = scene(1).write(tmp_path / "bag", plugin).glob(files)
    whole, generator = file.read_bytes(), np.random.default_rng(0)
    refusals = 0
    for round_ in range(60):
        damaged = bytearray(whole[: generator.integers(len(whole))] if round_ % 2 else whole)
        for place in generator.integers(len(damaged), size=5):
            damaged[place] ^= int(generator.integers(1, 256))
        file.write_bytes(damaged)
        try:
            assert read_bag(tmp_path / "bag", POLICY, BagOptions(TOPICS), 3)
        except SampleError:
            refusals += 1
    assert refusals


def test_without_rosbags_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "rosbags.rosbag2", None)
    with pytest.raises(SampleError, match=r"pip install flashrt_ros\[recordings\]"):
        read_bag(tmp_path, POLICY, BagOptions(TOPICS), 1)


def test_every_order_of_pixels_becomes_rgb() -> None:
    pixels = frame(0)
    alpha = np.dstack((pixels, np.full(pixels.shape[:2], 7, np.uint8)))
    assert np.array_equal(rgb(Frame(pixels, PixelOrder.RGB)), pixels)
    assert np.array_equal(rgb(Frame(alpha, PixelOrder.RGB)), pixels)
    assert np.array_equal(rgb(Frame(pixels[:, :, ::-1], PixelOrder.BGR)), pixels)
    assert np.array_equal(rgb(Frame(alpha[:, :, [2, 1, 0, 3]], PixelOrder.BGR)), pixels)
    assert np.array_equal(rgb(Frame(pixels[:, :, :1], PixelOrder.MONO)), pixels[:, :, [0, 0, 0]])
