"""Nine unmodified models through `accelerate`: what was found, kept and refused, and how fast the complete call became.

    python -m benchmarks.drop_in [--models a,b] [--compile a,b] [--out FILE]
    python -m benchmarks.drop_in --compile-only --models a,b [--out FILE]

Each model runs in a process of its own, at most --limit seconds, and its object in the result file is replaced as soon
as it is there, so that models can be measured one by one; --compile-only adds what torch.compile makes of models whose
object is there already. In every model two wrong kernels are planted in the registry.
A rehearsal without a GPU: --device cpu --tiny. (No file here may be called `accelerate.py`: where this folder is on the
path, as for a script in it, that would hide the package of this name that transformers looks for.)
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.drop_in_models import MODELS, Setting, Workload
from flashrt_ros.accelerate import Gates, ModuleStructure, Observation, Report, accelerate, registered
from flashrt_ros.measure.circumstances import machine, now, significant, versions
from flashrt_ros.measure.tables import table

OUT = Path(__file__).parent / "results" / "h200_accelerate.json"
PROTOCOL = (
    "Complete calls, host clock, from arguments on the device to a finished result there; eager and accelerated in "
    "interleaved rounds of one process, medians of rounds; the interval is of the median ratio, from order statistics, "
    "95 %. A turn is 50 ms of calls, at least one, after one that does not count. compile_ms: median of 20 calls of "
    "torch.compile in its default mode, after three; LeRobot's policies with the TF32 that their own switch sets. "
    "Where it was measured by itself, eager_beside_compile_ms is the eager call in that process. "
    "Parity: three examples, against the eager model with equal random seed. "
    "Each object says when and on how many cores it was measured, or, if it is older, when its file was written last; "
    "what stands around them is of the last run."
)
LEROBOTS_SWITCH = ("lerobot_pi05", "lerobot_pi0", "lerobot_smolvla")  # compile_model sets matmul precision "high"
_PACKAGES = ("flashrt_ros", "torch", "triton", "lerobot", "transformers", "timm", "diffusers", "nvidia-cudnn-cu13")


class Planted(ModuleStructure[nn.Linear]):
    """A wrong kernel for every linear layer: a tenth too large, at once or only after it was tried out."""

    def __init__(self, name: str, trials: int) -> None:
        self.name, self._trials = name, trials

    def hypotheses(self, module: nn.Module) -> Iterable[nn.Linear]:
        """Linear layers."""
        if isinstance(module, nn.Linear):
            yield module

    def reference(self, facts: nn.Linear, x: Tensor) -> Tensor:
        """What the layer computes."""
        return F.linear(x, facts.weight, facts.bias)

    def kernel(self, facts: nn.Linear, observation: Observation) -> Callable[..., Tensor]:
        """What it does not compute."""
        left = self._trials

        def wrong(x: Tensor) -> Tensor:
            nonlocal left
            left -= 1
            return F.linear(x, facts.weight, facts.bias) * (1.1 if left < 0 else 1.0)

        return wrong


PLANTED = (Planted("planted_wrong", 0), Planted("planted_wrong_later", 1))


def measure(
    name: str, setting: Setting, gates: Gates, compile_limit: int, keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Everything about one model; what is known before it is compiled is given to `keep`, as that takes longest."""
    start = time.perf_counter()
    workload = MODELS[name](setting)
    built_s = time.perf_counter() - start
    _say(f"{name}: built in {built_s:.0f} s ({workload.size})")
    with ExitStack() as stack:
        for structure in PLANTED:
            stack.enter_context(registered(structure))
        report = accelerate(
            workload.model, workload.examples, method=workload.method, gates=gates,
            progress=lambda done, total, text: _say(f"{name}: {done}/{total} {text}"),
            told=lambda candidate, found: _say(f"{name}: {candidate}: {found}"),
        )  # fmt: skip
    searched_s = time.perf_counter() - start - built_s
    with report:
        result = described(report, workload, searched_s)
    result["eager_ms"] = result["eager_ms"] or _typical(workload, setting.device)
    result["accelerated_ms"] = result["accelerated_ms"] or result["eager_ms"]
    result["measured"] = circumstances()
    if compile_limit:
        keep(result)
        result |= compiled(name, workload, setting, compile_limit)
    return result


def described(report: Report, workload: Workload, searched_s: float) -> dict[str, Any]:
    """One model's object."""
    latency, receipt = report.receipt.result["latency"], report.receipt
    accelerated = latency["ms"] if latency else None
    planted = {v.name: v.reason for v in receipt.candidates if v.name in {s.name for s in PLANTED}}
    assert not set(planted) & set(report.kept), "a planted wrong kernel was kept"
    others = [v for v in receipt.candidates if v.name not in planted]
    return {
        "size": workload.size,
        "method": f"{type(workload.model).__name__}.{workload.method}",
        "eager_ms": latency["baseline_ms"] if latency else None,
        "compile_ms": None,
        "accelerated_ms": accelerated,
        "speedup": latency["speedup"] if latency else 1.0,
        "interval": latency["interval"] if latency else None,
        "parity": receipt.result["parity"],
        "kept": list(report.kept),
        "refused": {v.name: v.reason for v in others if v.name not in report.kept},
        "found": {v.name: len(v.sites) for v in others if v.sites},
        "dropped": {v.name: _counted(v.dropped) for v in others if v.dropped},
        "alone": {v.name: v.latency | {"against": v.against} for v in others if v.latency},
        "planted": planted,
        "guards_percent": significant(100 * report.guard_ms / accelerated, 3) if accelerated else None,
        "sets_tried": receipt.search["tried"],
        "search_s": round(searched_s, 1),
    }


def _counted(dropped: Any) -> dict[str, int]:
    reasons = list(dropped.values())
    return {reason: reasons.count(reason) for reason in dict.fromkeys(reasons)}


def compiled(name: str, workload: Workload, setting: Setting, limit: int) -> dict[str, Any]:
    """The model's own torch.compile, given up after `limit` seconds."""
    precision = torch.get_float32_matmul_precision()

    def give_up(*_: object) -> None:
        raise TimeoutError(f"not compiled after {limit} s")

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(limit)
    start = time.perf_counter()
    try:
        if name in LEROBOTS_SWITCH:
            torch.set_float32_matmul_precision("high")
        function = torch.compile(getattr(workload.model, workload.method))
        ms = _typical(workload, setting.device, function)
        seconds = round(time.perf_counter() - start, 1)
        return {"compile_ms": ms, "compile_s": seconds, "compile_measured": circumstances()}
    except Exception as error:
        return {"compile_ms": None, "compile_failed": f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"}
    finally:
        signal.alarm(0)
        torch.set_float32_matmul_precision(precision)


def only_compiled(name: str, setting: Setting, limit: int, known: dict[str, Any]) -> dict[str, Any]:
    """A `known` object with what torch.compile makes of the model, and the eager call in the same process."""
    workload = MODELS[name](setting)
    eager = _typical(workload, setting.device)
    return uncompiled(known) | {"eager_beside_compile_ms": eager} | compiled(name, workload, setting, limit)


def uncompiled(known: dict[str, Any]) -> dict[str, Any]:
    """An object without what was known of torch.compile."""
    return {key: value for key, value in known.items() if not key.startswith(("compile", "eager_beside_compile"))}


def circumstances() -> dict[str, Any]:
    """When, and beside how many cores."""
    return {"date": now(), "cores": len(os.sched_getaffinity(0))}


def _typical(workload: Workload, device: torch.device, function: Callable[..., Any] | None = None) -> float:
    """Median milliseconds of a complete call."""
    call, times = function or getattr(workload.model, workload.method), []
    for index in range(23):
        args, kwargs = workload.examples[index % len(workload.examples)]
        start = time.perf_counter()
        with torch.no_grad():
            call(*args, **kwargs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - start) * 1e3)
    return significant(median(times[3:]))


def child(args: argparse.Namespace) -> int:
    """Measure one model in this process; its object goes to the file."""
    torch.manual_seed(0)
    gates = Gates(rounds=args.rounds, fewest_calls=1, most_sets=args.most_sets)
    limit = args.compile_limit if args.models in args.compile.split(",") or args.compile == "all" else 0
    known = _known(args.out)[args.models] if args.compile_only else {}
    try:
        setting = Setting(torch.device(args.device), args.tiny)
        if args.compile_only:
            result = only_compiled(args.models, setting, args.compile_limit, known)
        else:
            result = measure(args.models, setting, gates, limit, lambda found: write(args.out, args.models, found))
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}"
        result = {"failed": reason}
        if args.compile_only:
            result = uncompiled(known) | {"compile_ms": None, "compile_failed": reason}
    write(args.out, args.models, result)
    return 1 if "failed" in result or "compile_failed" in result else 0


def write(path: Path, name: str, result: dict[str, Any]) -> None:
    """Put one model's object into the file, in the order of MODELS."""
    _save(path, _known(path) | {name: result}, _facts())


def _known(path: Path) -> dict[str, Any]:
    models: dict[str, Any] = json.loads(path.read_text())["models"] if path.is_file() else {}
    return models


def _facts() -> dict[str, Any]:
    return {"date": now(), "machine": machine(), "versions": versions(_PACKAGES), "protocol": PROTOCOL}


def merge(path: Path, others: Sequence[Path]) -> None:
    """Take the objects of other result files, of the same machine, into `path`; their circumstances too."""
    known = _known(path)
    facts: dict[str, Any] = {}
    for other in others:
        facts = json.loads(other.read_text())
        known |= facts.pop("models")
    _save(path, known, facts)


def _save(path: Path, known: dict[str, Any], facts: dict[str, Any]) -> None:
    ordered = {model: known[model] for model in MODELS if model in known}
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(".part")  # whoever ends the process meanwhile leaves the old file or the new one
    half.write_text(json.dumps({"models": ordered, **facts}, indent=2) + "\n")
    half.replace(path)


def summary(path: Path, names: list[str]) -> str:
    """The models as a table, and for each what was kept and refused."""
    models = _known(path)
    rows, lines = [], []
    for name in names:
        r = models.get(name, {"failed": "no result"})
        if "failed" in r:
            rows.append((name, *[None] * 6, r["failed"][:60]))
            continue
        cosine = r["parity"]["cosine_worst"] if r["parity"] else None
        kept = " + ".join(r["kept"]) or "nothing"
        rows.append(
            (name, r["eager_ms"], r["compile_ms"], r["accelerated_ms"], r["speedup"], cosine, r["guards_percent"], kept)
        )
        lines += [f"{name}: {candidate}: {reason[:150]}" for candidate, reason in r["refused"].items()]
        lines += [f"{name}: {candidate} dropped: {str(why)[:150]}" for candidate, why in r["dropped"].items()]
        lines += [f"{name}: {candidate}: {reason[:100]}" for candidate, reason in r["planted"].items()]
    header = ("model", "eager ms", "compile ms", "accelerated ms", "times", "cosine", "guards %", "kept")
    return "\n".join([*lines, "", table(header, rows)])


def main() -> int:
    """Measure the chosen models one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default=",".join(MODELS), help="names, with commas between (default: all)")
    parser.add_argument("--compile", default="", help="names whose torch.compile is timed too, or 'all'")
    parser.add_argument("--compile-only", action="store_true", help="only torch.compile, of models that are in --out")
    parser.add_argument("--compile-limit", type=int, default=300, help="seconds that compiling may take (default: 300)")
    parser.add_argument("--limit", type=int, default=420, help="seconds that a model may take (default: 420)")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds (default: 9)")
    parser.add_argument("--most-sets", type=int, default=8, help="sets of candidates that are tried (default: 8)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="models of the same kinds, so small that a CPU runs them")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--merge", type=Path, nargs="+", help="only take the results of these files into --out")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = args.models.split(",")
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        parser.error(f"unknown model '{unknown[0]}'; there are: {', '.join(MODELS)}")
    absent = [name for name in names if name not in _known(args.out)] if args.compile_only else []
    if absent:
        parser.error(f"'{absent[0]}' is not in {args.out}; measure it first, without --compile-only")
    if args.child:
        return child(args)
    if args.merge:
        merge(args.out, args.merge)
        print(summary(args.out, list(MODELS)))
        return 0
    start = time.perf_counter()
    failed = [name for name in names if not _run(name, args)]
    print(summary(args.out, names))
    print(f"{len(names) - len(failed)} of {len(names)} models in {time.perf_counter() - start:.0f} s", flush=True)
    return 1 if failed else 0


def _run(name: str, args: argparse.Namespace) -> bool:
    """One model in a process of its own."""
    command = [
        sys.executable, "-W", "ignore", "-m", "benchmarks.drop_in", "--child", "--models", name, "--compile",
        args.compile, "--device", args.device, "--rounds", str(args.rounds), "--most-sets", str(args.most_sets),
        "--compile-limit", str(args.compile_limit), "--out", str(args.out), *(["--tiny"] if args.tiny else []),
        *(["--compile-only"] if args.compile_only else []),
    ]  # fmt: skip
    if not args.compile_only:
        _save(args.out, {model: found for model, found in _known(args.out).items() if model != name}, _facts())
    try:
        return subprocess.run(command, timeout=args.limit, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        late, found = f"not finished after {args.limit} s", _known(args.out).get(name)
        write(args.out, name, found | {"compile_failed": late} if found else {"failed": late})
        return False


def _say(text: str) -> None:
    print(f"accelerate: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
