"""The node end to end on a GPU: stamp of the oldest image or joint state used → chunk, and the engine's share of it.

Two triggered cameras of 640x480 at 30 Hz, joint states at 100 Hz and the policy node, each a process of its own, over
DDS. The state is in the prompt, so that every decision replays the prompt's stage too.

Run: `python benchmarks/node_gpu.py --checkpoint DIR` (writes benchmarks/results/h200_node.json), where DIR is what
`flashrt make-checkpoint` wrote; the first two of its views are used. Without a GPU: `--device cpu`, and no checkpoint
for the tiny preset, or `--set preset=pi05_tiny --tokens 111` for a checkpoint of its sizes.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from _common import percentiles, write_result
from node_overhead import milliseconds

from flashrt_ros.cli.main import CommandError
from flashrt_ros.cli.settings import policy_settings
from flashrt_ros.measure.errors import MeasureError
from flashrt_ros.measure.pi05.subject import Case
from flashrt_ros.msg import EngineStatus
from flashrt_ros.node.demo.errors import DemoError
from flashrt_ros.node.demo.graph import Graph, running_graph
from flashrt_ros.node.demo.recording import Recording
from flashrt_ros.node.demo.scene import JOINTS
from flashrt_ros.policies import PolicyError

CAMERA_ARGUMENTS = ("--card", "--triggered")
_ENDS = (("lower", -1e9), ("upper", 1e9))
# A decision waits for the next frame of both cameras, so that it is the cameras that set the pace. Weights that nobody
# trained move no arm within its limits, which are therefore those of no arm. Threads of a CPU operation would only take
# cores from the other processes.
PARAMETERS: dict[str, object] = {
    "image_wait": 0.1,
    "rate_hz": 100.0,
    "cpu_threads": 1,
    "max_first_step": 1e9,
    "max_step": 1e9,
}
PARAMETERS |= {f"limits.{joint.name}.{end}": value for joint in JOINTS for end, value in _ENDS}
VIEWS = {"front": {"topic": "front/image_raw"}, "left_wrist": {"topic": "wrist/image_raw"}}  # view → the demo's camera


def policy_of(checkpoint: Path, case: Case, assignments: list[str], folder: Path) -> dict[str, Any]:
    """Settings of the policy for `checkpoint`, cut to `case` in `folder`.

    What a user has to say of such a checkpoint is its size and the names of the state's values, which are the arm's
    joints; it records the names of its actions itself.
    """
    given = policy_settings(assignments or ["preset=pi05"])
    return {"name": "pi05", **case.settings({**given, "checkpoint": str(checkpoint.resolve())}, folder)}


def parameter_file(policy: Mapping[str, Any], folder: Path) -> Path:
    """Parameters of the policy node: the policy, and where its views come from."""
    path = folder / "policy.yaml"
    path.write_text(yaml.safe_dump({"/**": {"ros__parameters": {"policy": dict(policy), "views": VIEWS}}}))
    return path


def latencies(recording: Recording) -> dict[str, dict[str, float]]:
    """Of every chunk that arrived, in milliseconds: from the oldest stamp used, to each point on its way."""
    chunks = recording.chunks
    before = [(chunk.inference_start - chunk.oldest_observation) * 1e-6 for chunk in chunks]
    engine = [chunk.inference_duration * 1e-6 for chunk in chunks]
    return {
        "stamp_to_start_ms": percentiles(before),
        "start_to_checked_ms": percentiles(engine),
        "stamp_to_checked_ms": percentiles([a + b for a, b in zip(before, engine, strict=True)]),
        "stamp_to_received_ms": percentiles([chunk.age * 1e3 for chunk in chunks]),
    }


def facts(status: EngineStatus) -> dict[str, Any]:
    """What the node says of itself."""
    return {
        "device": status.device,
        "windows": status.ingest_path,
        "kernels": {kernel.op: kernel.reason or kernel.kernel for kernel in status.kernels},
        "chunks_published": status.chunks_published,
        "chunks_dropped": status.chunks_dropped,
        "stale_replays": status.stale_replays,
        "rate_hz": round(status.rate, 2),
        "camera_hz": {stream.name: round(stream.rate, 2) for stream in status.streams},
        "replays": {stage.name: stage.replays for stage in status.stages},
    }


def measure(graph: Graph, seconds: float) -> dict[str, Any]:
    """Let the graph run, and read what arrived and the node's own figures."""
    graph.run_for(seconds)
    if not graph.recording.chunks:
        raise DemoError(f"no chunk arrived in {seconds:g} s; run it longer, and see why in the policy's log (--logs)")
    status: EngineStatus = graph.operator.status_message
    found = latencies(graph.recording)
    engine, whole = status.session_time.p50 * 1e3, found["stamp_to_received_ms"]["p50"]
    return {
        "chunks": len(graph.recording.chunks),
        **found,
        "receipt_to_published_ms": milliseconds(status.latency),
        "engine_ms": milliseconds(status.session_time),
        "node_ms": milliseconds(status.overhead),
        "engine_share": round(engine / whole, 3),
        **facts(status),
    }


def main() -> None:
    """Run the graph and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="folder of `flashrt make-checkpoint` (default: tiny preset)")
    parser.add_argument("--chunk", type=int, default=10, help="actions in a chunk (default: 10)")
    parser.add_argument("--tokens", type=int, default=200, help="longest prompt, which every one takes (default: 200)")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE, one setting of the policy")
    parser.add_argument("--device", default="cuda", help="cpu, cuda or cuda:N (default: cuda)")
    parser.add_argument("--seconds", type=float, default=40.0, help="time from the first chunk on")
    parser.add_argument("--name", default="h200_node", help="of the result file")
    parser.add_argument("--logs", type=Path, help="folder for the processes' logs (default: not kept)")
    args = parser.parse_args()
    if args.set and args.checkpoint is None:
        parser.error("--set is for a checkpoint; give --checkpoint too")
    chosen = {**PARAMETERS, "device": args.device}
    with tempfile.TemporaryDirectory() as made:
        folder, policy, params = Path(made), {"preset": "pi05_tiny"}, None
        if args.checkpoint is not None:
            case = Case(len(VIEWS), args.chunk, args.tokens)
            try:
                policy = policy_of(args.checkpoint, case, args.set, folder / "checkpoint")
            except (PolicyError, MeasureError, CommandError) as error:
                parser.error(str(error))
            params = parameter_file(policy, folder)
            policy |= {"checkpoint": str(args.checkpoint), "views": list(VIEWS), "chunk": args.chunk}  # for the record
        with running_graph(args.logs or folder, lambda: None, params, chosen, CAMERA_ARGUMENTS) as graph:
            result = measure(graph, args.seconds)
    protocol = (
        f"{args.seconds:g} s. Stamps are of the system clock. start: the worker begins to fill the windows; "
        "checked: the whole chunk has passed its checks; received: another process has it. Of the node's newest 1000 "
        "decisions: receipt_to_published, from the callback of the newer image to the return of publish(); engine, "
        "first byte copied into a window → actions; node, the difference. engine_share: medians, engine of "
        "stamp_to_received"
    )
    write_result(args.name, {**result, "parameters": chosen, "policy": policy}, protocol)


if __name__ == "__main__":
    main()
