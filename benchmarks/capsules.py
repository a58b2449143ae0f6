"""What capsules cost, beside plain copies and plain files of the same bytes in the same run.

Run: `python benchmarks/capsules.py --device cuda --checkpoint DIR` (writes benchmarks/results/h200_capsules.json on an
H200, capsules_<device>.json elsewhere). Without a checkpoint the tiny preset is measured.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import write_result

from flashrt_ros.engine import CapsuleFolder, CapsuleStore, Session, resolve_device
from flashrt_ros.ops.region_copy import region_copy
from flashrt_ros.policies import Policy, PolicyRunner, build_policy
from flashrt_ros.policies.pixels import PixelOrder

ROUNDS = 60
WARM_UP = 10
FRAMES = np.random.default_rng(1).integers(0, 256, (4, 480, 640, 3), np.uint8)
TASKS = ("pick up the red cup and put it down", "open the drawer on the left side of the table")
MIB = 1 << 20


class Clock:
    """Times one call: on the device by events, and on the wall until the device has finished."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self._on_gpu else []

    def time(self, call: Callable[[], object]) -> tuple[float, float]:
        """(device µs, wall µs); on a CPU both are the wall's."""
        self.wait()
        start = time.perf_counter_ns()
        if self._on_gpu:
            self._events[0].record()
        call()
        if self._on_gpu:
            self._events[1].record()
        self.wait()
        wall = (time.perf_counter_ns() - start) / 1e3
        return (self._events[0].elapsed_time(self._events[1]) * 1e3 if self._on_gpu else wall), wall

    def wait(self) -> None:
        """Until the device has nothing left to do."""
        if self._on_gpu:
            torch.cuda.synchronize()


def start(policy: Policy, device: str, tier: str) -> PolicyRunner:
    """A runner whose capsules go to `tier` ("gpu", "host", or "none": no store is made)."""
    resolved = resolve_device(device)
    sizes = {"gpu": (256 * MIB, MIB), "host": (0, 256 * MIB)}
    store = CapsuleStore(resolved, *sizes[tier]) if tier in sizes else None
    session = Session(policy.contract, policy.bodies, device, 0, store, region_copy(device))
    policy.prepare(session)
    session.configure()
    runner = PolicyRunner(policy, session)
    runner.set_state(np.zeros(len(policy.state_names), np.float32))
    return runner


def decide(runner: PolicyRunner, task: int, frame: int) -> None:
    """One decision with new images."""
    for view in runner.policy.views:
        runner.set_image(view, FRAMES[frame % len(FRAMES)], PixelOrder.RGB)
    runner.set_instruction(TASKS[task])
    runner.decide()


def operations(policy: Policy, device: str, tier: str, clock: Clock) -> dict[str, Any]:
    """Snapshot, restore and fork of one tier, each after a decision that changed what it copies."""
    origin, twin = start(policy, device, tier), start(policy, device, "none")
    session = origin.session
    times: dict[str, list[tuple[float, float]]] = {"snapshot": [], "restore": [], "fork": []}
    decide(origin, 0, 0)
    for round_number in range(WARM_UP + ROUNDS):
        decide(origin, 0, round_number)
        times["snapshot"].append(clock.time(lambda: session.snapshot("a", replace=True)))
        decide(origin, 0, round_number + 1)
        times["restore"].append(clock.time(lambda: session.restore("a")))
        decide(twin, 0, round_number)
        times["fork"].append(clock.time(lambda: session.fork("a", twin.session)))
    result = {name: _medians(values[WARM_UP:]) for name, values in times.items()}
    result["bytes"] = session.capsules.get("a").nbytes
    for runner in (origin, twin):
        runner.close()
    return result


def copies(nbytes: int, device: torch.device, clock: Clock) -> dict[str, float]:
    """One contiguous copy of `nbytes`: on the device, and between it and pinned host memory (µs on the device)."""
    pinned = torch.ones(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    one, two = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    pairs = {"copy_us": (two, one), "pinned_out_us": (pinned, one), "pinned_in_us": (one, pinned)}
    result = {}
    for name, (target, source) in pairs.items():
        times = [
            clock.time(lambda t=target, s=source: t.copy_(s, non_blocking=True))[0]  # type: ignore[misc]
            for _ in range(WARM_UP + ROUNDS)
        ]
        result[name] = round(statistics.median(times[WARM_UP:]), 2)
    return result


def next_action(policy: Policy, device: str, clock: Clock) -> dict[str, float]:
    """Milliseconds to the next action after a switch of task: from its images and text, and from its capsule."""
    runner = start(policy, device, "gpu")
    for task in range(2):
        decide(runner, task, task)
        runner.session.snapshot(f"task{task}")
    times: dict[str, list[float]] = {"rebuild_ms": [], "restore_ms": []}

    def restore(task: int) -> None:
        runner.session.restore(f"task{task}")
        runner.decide()

    for round_number in range(WARM_UP + ROUNDS):
        task = round_number % 2
        times["rebuild_ms"].append(clock.time(lambda task=task: decide(runner, task, task))[1] / 1e3)  # type: ignore[misc]
        times["restore_ms"].append(clock.time(lambda task=task: restore(1 - task))[1] / 1e3)  # type: ignore[misc]
    runner.close()
    return {name: round(statistics.median(values[WARM_UP:]), 3) for name, values in times.items()}


def unused(policy: Policy, device: str, clock: Clock) -> list[float]:
    """Milliseconds of a decision without and with a store that nobody uses, interleaved."""
    runners = [start(policy, device, "none"), start(policy, device, "gpu")]
    times: list[list[float]] = [[], []]
    for round_number in range(WARM_UP + ROUNDS):
        for runner, kept in zip(runners, times, strict=True):
            kept.append(clock.time(lambda r=runner, n=round_number: decide(r, 0, n))[1] / 1e3)  # type: ignore[misc]
    for runner in runners:
        runner.close()
    return [round(statistics.median(kept[WARM_UP:]), 3) for kept in times]


def files(policy: Policy, device: str) -> dict[str, float]:
    """Milliseconds to save and load one capsule, and to write (with fsync) and read the same bytes plainly."""
    runner = start(policy, device, "host")
    decide(runner, 0, 0)
    capsule = runner.session.snapshot("a")
    times: dict[str, list[float]] = {n: [] for n in ("durable_save", "durable_load", "plain_write", "plain_read")}
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder, plain = CapsuleFolder(Path(name)), Path(name) / "plain"
        data = capsule.block.cpu().numpy().tobytes()

        def write() -> None:
            with open(plain, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())

        calls: Mapping[str, Callable[[], object]] = {
            "durable_save": lambda: folder.save(capsule),
            "plain_write": write,
            "durable_load": lambda: folder.load("a"),
            "plain_read": lambda: np.fromfile(plain, np.uint8),
        }
        for _ in range(WARM_UP + ROUNDS):
            for label, call in calls.items():
                begin = time.perf_counter_ns()
                call()
                times[label].append((time.perf_counter_ns() - begin) / 1e6)
    runner.close()
    return {f"{label}_ms": round(statistics.median(values[WARM_UP:]), 3) for label, values in times.items()}


def _medians(values: list[tuple[float, float]]) -> dict[str, float]:
    device, wall = zip(*values, strict=True)
    return {"device_us": round(statistics.median(device), 2), "wall_us": round(statistics.median(wall), 2)}


def main() -> None:
    """Measure everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--checkpoint", default="")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE, one setting of the policy")
    args = parser.parse_args()
    from flashrt_ros.cli.settings import policy_settings

    settings = policy_settings(args.set)
    if args.checkpoint:
        settings = {"preset": "pi05", "checkpoint": args.checkpoint, **policy_settings(args.set or ["plan=split"])}
    device = resolve_device(args.device)
    clock, policy = Clock(device), build_policy("pi05", settings, args.device)
    tiers = {tier: operations(policy, args.device, tier, clock) for tier in ("gpu", "host")}
    nbytes = tiers["gpu"].pop("bytes")
    tiers["host"].pop("bytes")
    result = {
        "policy": policy.name,
        "checkpoint": "seeded weights of the true size" if args.checkpoint else policy.checkpoint,
        "views": len(policy.views),
        "bytes": nbytes,
        "bytes_if_all_rows": sum(region.nbytes for region in policy.contract.regions),
        **copies(nbytes, device, clock),
        **{name: {tier: tiers[tier][name] for tier in tiers} for name in ("snapshot", "restore", "fork")},
        **next_action(policy, args.device, clock),
        **files(policy, args.device),
        "decision_ms_store_off_on": unused(policy, args.device, clock),
    }
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    result["device"] = name
    write_result(
        "h200_capsules" if "H200" in name else f"capsules_{device.type}",
        result,
        protocol=f"medians of {ROUNDS} interleaved rounds after {WARM_UP}; wall: until the device has finished",
    )


if __name__ == "__main__":
    main()
