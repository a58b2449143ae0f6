"""The client that switches between two tasks, against a real node."""

from __future__ import annotations

from pathlib import Path

import pytest
from rclpy.node import Node

from flashrt_ros.node.demo.errors import DemoError
from flashrt_ros.node.demo.scene import INSTRUCTIONS
from flashrt_ros.node.demo.two_tasks import TaskSwitcher, switch_tasks
from test.node.rig import Rig, record_chunks
from test.node.test_capsule_services import Scene


def switcher_of(rig: Rig) -> TaskSwitcher:
    node = Node("two_tasks", context=rig.context)
    switcher = TaskSwitcher(node, lambda: False)
    rig.at_end(node.destroy_node)
    rig.at_end(switcher.close)
    return switcher


def test_both_tasks_are_taken_up_by_instruction_and_by_capsule(rig: Rig, tmp_path: Path) -> None:
    Scene(rig, tmp_path, rate_hz=20.0).activate()
    chunks = record_chunks(rig)
    switcher = switcher_of(rig)
    switcher.wait_for_the_node()
    times = switch_tasks(switcher, rounds=2)
    assert {way: len(pairs) for way, pairs in times.items()} == {"by instruction": 4, "by capsule": 4}
    assert all(0 < decided <= waited for pairs in times.values() for waited, decided in pairs)
    seen = {(chunk.capsule, chunk.instruction) for chunk in chunks.messages if chunk.capsule}
    assert seen == {("task_0", INSTRUCTIONS[0]), ("task_1", INSTRUCTIONS[1])}


def test_a_refusal_ends_it_with_the_nodes_own_words(rig: Rig, tmp_path: Path) -> None:
    Scene(rig, tmp_path).activate()
    switcher = switcher_of(rig)
    switcher.wait_for_the_node()
    with pytest.raises(DemoError, match="no capsule is called 'never'"):
        switcher.restore("never")
