"""Two clients ask for capsules as fast as they can while the node decides at full rate, for two minutes."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rclpy.node import Node

from flashrt_ros.msg import CapsuleResult
from flashrt_ros.srv import DropCapsule, ListCapsules, Restore, Snapshot
from test.node.rig import PROBE, Rig, record_chunks, record_status, wait_until
from test.node.robot import default_robot

SECONDS = 120.0
WARM_UP_SECONDS = 20.0
NAMES = ("one", "two", "three")


class Client:
    """One client with names of its own, so that it knows what every answer must be."""

    def __init__(self, rig: Rig, number: int) -> None:
        self.node: Node = rig.add(Node(f"client_{number}", context=rig.context))
        self.causes: Counter[int] = Counter()
        self.wrong: list[str] = []
        self._draw = random.Random(number)
        self._names = [f"{name}_{number}" for name in NAMES]
        self._saved: dict[str, str] = {}
        self._clients = {
            kind: self.node.create_client(kind, name)
            for kind, name in (
                (Snapshot, "snapshot"),
                (Restore, "restore"),
                (DropCapsule, "policy/drop_capsule"),
                (ListCapsules, "policy/list_capsules"),
            )
        }

    def ready(self) -> bool:
        return all(client.service_is_ready() for client in self._clients.values())

    def hammer(self, until: float) -> None:
        actions = (self._snapshot, self._snapshot, self._restore, self._restore, self._drop, self._list)
        while time.monotonic() < until and not self.wrong:
            self._draw.choice(actions)()

    def _call(self, request_type: Any, **fields: Any) -> Any:
        future = self._clients[request_type].call_async(request_type.Request(**fields))
        wait_until(future.done, f"an answer of {request_type.__name__}")
        answer = future.result()
        self.causes[answer.result.cause] += 1
        return answer

    def _expect(self, answer: Any, cause: int, what: str) -> bool:
        if answer.result.cause != cause:
            self.wrong.append(f"{what}: {answer.result.cause} instead of {cause}: {answer.result.message}")
        return bool(answer.result.cause == CapsuleResult.SUCCESS)

    def _snapshot(self) -> None:
        name, replace = self._draw.choice(self._names), self._draw.random() < 0.5
        answer = self._call(Snapshot, name=name, replace=replace, description=str(self._draw.random()))
        taken = name in self._saved and not replace
        cause = CapsuleResult.ALREADY_EXISTS if taken else CapsuleResult.SUCCESS
        if self._expect(answer, cause, f"snapshot {name}"):
            self._saved[name] = answer.capsule.description

    def _restore(self) -> None:
        name = self._draw.choice(self._names)
        cause = CapsuleResult.SUCCESS if name in self._saved else CapsuleResult.UNKNOWN_NAME
        self._expect(self._call(Restore, name=name), cause, f"restore {name}")

    def _drop(self) -> None:
        name = self._draw.choice(self._names)
        cause = CapsuleResult.SUCCESS if self._saved.pop(name, None) else CapsuleResult.UNKNOWN_NAME
        self._expect(self._call(DropCapsule, name=name), cause, f"drop {name}")

    def _list(self) -> None:
        listed = {c.name: c.description for c in self._call(ListCapsules).capsules if c.name in self._names}
        if listed != self._saved:
            self.wrong.append(f"listed {listed}, saved {self._saved}")


def resident_kib() -> int:
    """Memory that this process holds."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])


def test_two_clients_at_full_rate_get_right_answers_and_memory_stays_flat(rig: Rig, tmp_path: Path) -> None:
    default_robot(rig).start()
    chunks, statuses = record_chunks(rig), record_status(rig)
    rig.active_policy({**PROBE, "rate_hz": 50.0, "capsules.folder": str(tmp_path), "capsules.timeout": 5.0})
    chunks.next()
    clients = [Client(rig, number) for number in range(2)]
    for client in clients:
        wait_until(client.ready, "the services are found")
    until = time.monotonic() + SECONDS
    threads = [threading.Thread(target=client.hammer, args=(until,), daemon=True) for client in clients]
    for thread in threads:
        thread.start()
    threads[0].join(WARM_UP_SECONDS)
    warm, memory = len(chunks), resident_kib()
    for thread in threads:
        thread.join(SECONDS + 20)
        assert not thread.is_alive()
    assert not [fault for client in clients for fault in client.wrong]
    causes = sum((client.causes for client in clients), Counter())
    assert causes[CapsuleResult.SUCCESS] > 1000
    assert set(causes) == {CapsuleResult.SUCCESS, CapsuleResult.ALREADY_EXISTS, CapsuleResult.UNKNOWN_NAME}
    ids = [chunk.chunk_id for chunk in chunks.messages]
    assert ids == sorted(set(ids))
    assert len(ids) - warm > (SECONDS - WARM_UP_SECONDS) * 10  # it went on deciding all the while
    assert statuses.messages[-1].stale_replays == 0
    # The recorders keep every message; 4 KiB for each chunk that came is far above what they hold.
    assert resident_kib() - memory < (len(ids) - warm) * 4 + 8192
