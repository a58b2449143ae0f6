"""The capsule services. This version of the node has no capsules and says so, with the interface's own cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.node import Node

from ..msg import CapsuleResult
from ..srv import DropCapsule, Fork, ListCapsules, Restore, Snapshot

_SERVICES: tuple[tuple[Any, str], ...] = (
    (Snapshot, "snapshot"),
    (Restore, "restore"),
    (Fork, "fork"),
    (ListCapsules, "~/list_capsules"),
    (DropCapsule, "~/drop_capsule"),
)


class CapsuleServices:
    """The five services, in a callback group of their own, so that they answer while anything else goes on."""

    def __init__(self, node: Node) -> None:
        self._node = node
        group = ReentrantCallbackGroup()
        self._services = [
            node.create_service(kind, name, _not_available(name), callback_group=group) for kind, name in _SERVICES
        ]

    def close(self) -> None:
        """Take all of them down."""
        for service in self._services:
            self._node.destroy_service(service)


def _not_available(name: str) -> Callable[[Any, Any], Any]:
    text = f"{name.removeprefix('~/')}: capsules are not available in this version of the node"

    def answer(_: Any, response: Any) -> Any:
        response.result = CapsuleResult(cause=CapsuleResult.NOT_AVAILABLE, message=text)
        return response

    return answer
