"""What capsules cost, beside plain copies and plain files of the same bytes in the same run.

Run: `python benchmarks/capsules.py --device cuda --checkpoint DIR` (writes benchmarks/results/h200_capsules.json on an
H200, capsules_<device>.json elsewhere). Without a checkpoint the tiny preset is measured. A checkpoint is cut to
`--views` and `--chunk`, and every prompt has exactly `--tokens` tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import write_result

from flashrt_ros.engine import CapsuleFolder, CapsuleStore, Session, resolve_device
from flashrt_ros.measure.pi05.observations import random_tokens
from flashrt_ros.measure.pi05.subject import Case
from flashrt_ros.measure.tables import table
from flashrt_ros.ops.region_copy import region_copy
from flashrt_ros.policies import PolicyRunner
from flashrt_ros.policies.pi05 import Pi05Policy, build
from flashrt_ros.policies.pi05.processor import Pi05Processor, Prompt
from flashrt_ros.policies.pixels import PixelOrder

ROUNDS = 40
WARM_UP = 8
FRAMES = np.random.default_rng(1).integers(0, 256, (4, 480, 640, 3), np.uint8)
TASKS = ("the first task", "the second task")
MIB = 1 << 20
OPERATIONS = ("snapshot", "restore", "fork")
WALL_BAR_US = 60.0
_HOLD_CYCLES = 3_000_000  # of the GPU's clock, 1.5 ms or more: longer than the host needs to enqueue what is timed

PROTOCOL = (
    f"Medians of {ROUNDS} interleaved rounds after {WARM_UP}, each call with a device that has nothing left to do. "
    "wall_us: the host's clock until the device has finished; enqueue_us: until the call has returned; both of calls "
    "that follow one another behind a decision, in an order that moves on by one each round. after_decision: the same "
    "of calls that each come right after a whole decision. after_empty_loop: of snapshots behind a loop on the host "
    "that does nothing for as long as a decision takes, and behind another snapshot. device_us: between device events, "
    "in a run of its own whose queue is held until all is enqueued, so that no host time is in it. launch: the "
    "prepared copy alone, without a session. rebuild and restore end with actions on the host."
)


class Clock:
    """Times one call at a time."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        if self.on_gpu:
            self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._stream = torch.cuda.current_stream(device)

    def host(self, call: Callable[[], object]) -> tuple[float, float]:
        """(until `call` has returned, until the device has finished), in µs."""
        self.wait()
        start = time.perf_counter_ns()
        call()
        returned = time.perf_counter_ns()
        self.wait()
        return (returned - start) / 1e3, (time.perf_counter_ns() - start) / 1e3

    def device(self, call: Callable[[], object]) -> float:
        """Time that the device works on `call`, in µs; on a CPU, where calls do their own work, the host's."""
        if not self.on_gpu:
            return self.host(call)[1]
        torch.cuda._sleep(_HOLD_CYCLES)  # type: ignore[no-untyped-call]
        self._begin.record(self._stream)
        call()
        self._end.record(self._stream)
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) * 1e3

    def wait(self) -> None:
        """Until the device has nothing left to do."""
        if self.on_gpu:
            self._stream.synchronize()


class Series:
    """Times of one call, round by round; `before` brings everything into the state that the call needs."""

    def __init__(self, clock: Clock, call: Callable[[], object], before: Callable[[], object]) -> None:
        self._clock, self._call, self._before = clock, call, before
        self._host: list[tuple[float, float]] = []
        self._after_decision: list[tuple[float, float]] = []
        self._device: list[float] = []

    def measure_in_turn(self) -> None:
        """By the host's clock, behind whatever came before."""
        self._host.append(self._clock.host(self._call))

    def measure_after_decision(self) -> None:
        """By the host's clock right after a decision, then by the device's."""
        self._before()
        self._after_decision.append(self._clock.host(self._call))
        self._before()
        self._device.append(self._clock.device(self._call))

    def medians(self) -> dict[str, Any]:
        """After the rounds of warming up."""
        device = round(statistics.median(self._device[WARM_UP:]), 2)
        return {"device_us": device, **host_medians(self._host), "after_decision": host_medians(self._after_decision)}


def host_medians(seen: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Of what `Clock.host` returned, round by round."""
    enqueue, wall = (round(statistics.median(column), 2) for column in zip(*seen[WARM_UP:], strict=True))
    return {"wall_us": wall, "enqueue_us": enqueue}


def snapshots_after_a_loop(clock: Clock, session: Session, seconds: float) -> dict[str, float]:
    """Snapshots behind a loop on the host that does nothing for so long: what waiting alone costs the next call."""
    seen = []
    for _ in range(WARM_UP + ROUNDS):
        session.snapshot("a", replace=True)
        clock.wait()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass
        seen.append(clock.host(lambda: session.snapshot("a", replace=True)))
    return host_medians(seen)


class DrawnPrompts(Pi05Processor):
    """Prompts of exactly so many tokens, drawn from the vocabulary by the instruction; no tokenizer is asked."""

    def __init__(self, processor: Pi05Processor, policy: Pi05Policy) -> None:
        vars(self).update(vars(processor))
        length = policy.config.prompt_buckets[-1]
        self._prompts = {
            task: Prompt(task, random_tokens(policy.config, length, np.random.default_rng(seed)), length, length)
            for seed, task in enumerate(TASKS)
        }

    def text(self, instruction: str, state: np.ndarray | None) -> str:
        """The instruction as it is."""
        return instruction

    def prompt(self, text: str) -> Prompt:
        """The tokens drawn for it."""
        return self._prompts[text]


def start(policy: Pi05Policy, device: str, tier: str) -> PolicyRunner:
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


def decide(runner: PolicyRunner, task: int, frame: int) -> tuple[str, ...]:
    """One decision with new images; returns the stages that were replayed."""
    for view in runner.policy.views:
        runner.set_image(view, FRAMES[frame % len(FRAMES)], PixelOrder.RGB)
    runner.set_instruction(TASKS[task])
    return runner.decide().replayed


def operations(policy: Pi05Policy, device: str, tier: str, clock: Clock) -> dict[str, Any]:
    """Snapshot, restore and fork of one tier and plain copies of the same bytes, in turn and right after decisions."""
    origin, twin = start(policy, device, tier), start(policy, device, "none")
    session, frame = origin.session, iter(range(1_000_000))
    decide(origin, 0, 0)
    capsule = session.snapshot("a")
    beside = torch.ones(capsule.nbytes, dtype=torch.uint8, device=session.device)
    move = region_copy(device)(session.arena.storage, capsule.layout.segments)

    def decided() -> None:
        decide(origin, 0, next(frame))

    def copy(target: torch.Tensor, source: torch.Tensor) -> Callable[[], object]:
        return lambda: target.copy_(source, non_blocking=True)

    out, back = copy(capsule.block, beside), copy(beside, capsule.block)
    series = {
        "copy_out": Series(clock, out, decided),
        "snapshot": Series(clock, lambda: session.snapshot("a", replace=True), decided),
        "copy_in": Series(clock, back, decided),
        "restore": Series(clock, lambda: session.restore("a"), decided),
        "fork": Series(clock, lambda: session.fork("a", twin.session), lambda: decide(twin, 0, next(frame))),
        "launch": Series(clock, lambda: move(beside, True), decided),
        "nothing": Series(clock, lambda: None, decided),
    }
    order = list(series.values())
    for _ in range(WARM_UP + ROUNDS):
        decided()
        for each in order:
            each.measure_in_turn()
        order.append(order.pop(0))
        for each in order:
            each.measure_after_decision()
    begin = time.perf_counter()
    decided()
    result: dict[str, Any] = {name: each.medians() for name, each in series.items()}
    result["after_empty_loop"] = snapshots_after_a_loop(clock, session, time.perf_counter() - begin)
    result["bytes"] = capsule.nbytes
    for runner in (origin, twin):
        runner.close()
    return result


def next_action(policy: Pi05Policy, device: str, clock: Clock) -> dict[str, Any]:
    """Milliseconds to the next action after a switch of task: from its images and text, and from its capsule.

    `action_ms` is one replay of the last stage alone, which a restore cannot save.
    """
    runner = start(policy, device, "gpu")
    session = runner.session
    for task in range(2):
        decide(runner, task, task)
        session.snapshot(f"task{task}")
    replayed: dict[str, tuple[str, ...]] = {}
    times: dict[str, list[float]] = {"rebuild_ms": [], "restore_ms": [], "action_ms": []}

    def rebuild(task: int) -> None:
        replayed["rebuild"] = decide(runner, task, task)

    def restore(task: int) -> None:
        session.restore(f"task{task}")
        replayed["restore"] = runner.decide().replayed

    last = policy.contract.order[-1].name
    for _ in range(WARM_UP + ROUNDS):  # each of them leaves the other's task
        times["rebuild_ms"].append(clock.host(lambda: rebuild(0))[1] / 1e3)
        times["restore_ms"].append(clock.host(lambda: restore(1))[1] / 1e3)
        times["action_ms"].append(clock.host(lambda: session.replay(last))[1] / 1e3)
    runner.close()
    return {
        **{name: round(statistics.median(values[WARM_UP:]), 3) for name, values in times.items()},
        "replayed": replayed,
    }


def unused(policy: Pi05Policy, device: str, clock: Clock) -> list[float]:
    """Milliseconds of a decision without and with a store that nobody uses, interleaved."""
    runners = [start(policy, device, "none"), start(policy, device, "gpu")]
    times: list[list[float]] = [[], []]
    for round_number in range(WARM_UP + ROUNDS):
        for runner, kept in zip(runners, times, strict=True):
            kept.append(clock.host(lambda r=runner, n=round_number: decide(r, 0, n))[1] / 1e3)  # type: ignore[misc]
    for runner in runners:
        runner.close()
    return [round(statistics.median(kept[WARM_UP:]), 3) for kept in times]


def files(policy: Pi05Policy, device: str) -> dict[str, float]:
    """Milliseconds to save and load one capsule, and to write (with fsync) and read the same bytes plainly."""
    runner = start(policy, device, "host")
    decide(runner, 0, 0)
    capsule = runner.session.capture("a")
    times: dict[str, list[float]] = {n: [] for n in ("durable_save", "plain_write", "durable_load", "plain_read")}
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder, plain = CapsuleFolder(Path(name)), Path(name) / "plain"
        data = capsule.host_bytes().numpy().tobytes()

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


def bars(result: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """(what, measured, at most), for every figure that has a bar."""
    copies, found = result["copies"], []
    for name in OPERATIONS:
        beside = "copy_out" if name == "snapshot" else "copy_in"
        gpu, host = result[name]["gpu"], result[name]["host"]
        found += [
            (f"{name} gpu wall_us", gpu["wall_us"], WALL_BAR_US),
            (f"{name} gpu wall_us after a decision", gpu["after_decision"]["wall_us"], WALL_BAR_US),
            (f"{name} gpu device_us", gpu["device_us"], round(3 * copies["gpu"][beside]["device_us"], 2)),
            (f"{name} host wall_us", host["wall_us"], round(1.5 * copies["host"][beside]["wall_us"], 2)),
            (f"{name} host device_us", host["device_us"], round(1.5 * copies["host"][beside]["device_us"], 2)),
        ]
    return [
        *found,
        ("bytes", result["bytes"], 10_000_000),
        ("restore_ms", result["restore_ms"], round(result["rebuild_ms"] / 2.5, 3)),
        ("durable_save_ms", result["durable_save_ms"], round(1.5 * result["plain_write_ms"], 3)),
        ("durable_load_ms", result["durable_load_ms"], round(1.5 * result["plain_read_ms"], 3)),
    ]


def measured(policy: Pi05Policy, device: str) -> dict[str, Any]:
    """Every figure of the result."""
    clock = Clock(resolve_device(device))
    tiers = {tier: operations(policy, device, tier, clock) for tier in ("gpu", "host")}
    return {
        "bytes": tiers["gpu"]["bytes"],
        "bytes_if_all_rows": sum(region.nbytes for region in policy.contract.regions),
        "copy_us": tiers["gpu"]["copy_out"]["device_us"],
        **{name: {tier: tiers[tier][name] for tier in tiers} for name in OPERATIONS},
        "copies": {tier: {name: tiers[tier][name] for name in ("copy_out", "copy_in")} for tier in tiers},
        "after_empty_loop": tiers["gpu"]["after_empty_loop"],
        "launch": tiers["gpu"]["launch"],
        "nothing": tiers["gpu"]["nothing"],
        **next_action(policy, device, clock),
        **files(policy, device),
        "decision_ms_store_off_on": unused(policy, device, clock),
    }


def main() -> None:
    """Measure everything, write the result, and print it beside the bars."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--checkpoint", default="", help="folder, as `flashrt make-checkpoint` writes it")
    parser.add_argument("--views", type=int, default=2)
    parser.add_argument("--chunk", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=14)
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE, one setting of the policy")
    args = parser.parse_args()
    from flashrt_ros.cli.settings import policy_settings

    given = policy_settings(args.set or ["preset=pi05" if args.checkpoint else "preset=pi05_tiny"])
    given = {"plan": "split", **given, **({"checkpoint": args.checkpoint} if args.checkpoint else {})}
    with tempfile.TemporaryDirectory() as folder:
        case = Case(args.views, args.chunk, args.tokens)
        policy = build(case.settings(given, Path(folder) / "checkpoint"), args.device)
        policy = dataclasses.replace(policy, processor=DrawnPrompts(policy.processor, policy))
        result = measured(policy, args.device)
    device = resolve_device(args.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    found = {
        "policy": policy.name,
        "checkpoint": "seeded weights of the true size" if args.checkpoint else policy.checkpoint,
        "views": len(policy.views),
        "chunk": policy.chunk,
        "tokens": policy.config.prompt_buckets[-1],
        **result,
        "device": name,
    }
    target = "h200_capsules" if "H200" in name else f"capsules_{device.type}"
    write_result(target, found, PROTOCOL)
    rows = [(what, value, most, "yes" if value <= most else "NO") for what, value, most in bars(result)]
    print(table(("", "measured", "at most", "reached"), rows))


if __name__ == "__main__":
    main()
