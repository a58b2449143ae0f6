"""`flashrt profile`: which kernels a decision is made of, and how idle the device is between them."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .main import CommandError
from .measured import add_weights_arguments, cases, weights_settings

if TYPE_CHECKING:
    from ..measure.pi05.subject import Subject
    from ..measure.trace import Span

NAME = "profile"
HELP = "kernel time, kernels between matrix products, gaps, and one layer's timeline as a picture"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the policy and where the results go."""
    parser.add_argument("policy", choices=("pi05",), help="which policy")
    add_weights_arguments(parser)
    parser.add_argument("--case", type=cases, default=[(None, None)], metavar="VxC", help="views x chunk, such as 2x10")
    parser.add_argument("--tokens", type=int, help="prompt tokens, exactly (default: the longest prompt)")
    parser.add_argument("--baselines", default="none", help="none, or names as of `flashrt bench`")
    parser.add_argument("--png", type=Path, help="draw one layer of each stage")
    parser.add_argument("--top", type=int, default=12, help="kernels to list by time (default: 12)")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")


def run(args: argparse.Namespace) -> int:
    """Trace every stage once, and print, write and draw what was seen."""
    from ..engine import EngineError
    from ..measure.errors import MeasureError
    from ..measure.pi05.observations import photographs
    from ..measure.pi05.subject import Case, Subject
    from ..policies import PolicyError

    try:
        views, chunk = args.case[0]
        with tempfile.TemporaryDirectory() as folder:
            given = weights_settings(args)
            settings = Case(views, chunk, args.tokens).settings(given, Path(folder) / "checkpoint")
            subject = Subject(settings, args.device, photographs(args.images))
            traces = _traces(subject, args.baselines)
            if args.png:
                _draw(traces, args.png)
    except (PolicyError, EngineError, MeasureError) as error:
        raise CommandError(str(error)) from None
    report = _report(traces, args.device)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=2) + "\n")
    print(summary(report, traces, args.top))
    return 0


def _traces(subject: Subject, rivals: str) -> dict[str, list[Span]]:
    """Spans of the whole decision, of each stage, and of each baseline."""
    from ..measure.pi05.baselines import Shared, baselines
    from ..measure.trace import traced

    session = subject.runner.session
    traces = {"decision": subject.trace()}
    for stage in subject.stages:
        traces[stage] = traced(_replay(subject, stage), session.device)
    if rivals != "none":
        checkpoint = subject.policy.checkpoint
        folder = None if checkpoint.startswith("preset:") else Path(checkpoint)
        shared = Shared(subject.policy.config, folder, session.device, subject.observation())
        with baselines(tuple(rivals.split(",")), shared) as built:
            for rival in built:
                rival.run()
                traces[rival.name] = traced(rival.run, session.device)
    return traces


def _replay(subject: Subject, stage: str) -> Callable[[], None]:
    return lambda: subject.runner.session.replay(stage)


def _draw(traces: Mapping[str, list[Span]], path: Path) -> None:
    from ..measure.timeline import draw_layers
    from ..measure.trace import one_layer

    draw_layers({name: one_layer(spans) for name, spans in traces.items() if name != "decision"}, path)
    print(f"profile: {path}", file=sys.stderr)


def _report(traces: Mapping[str, list[Span]], device: str) -> dict[str, Any]:
    from dataclasses import asdict

    from ..measure.circumstances import machine, now, versions
    from ..measure.trace import by_name, figures, one_layer

    return {
        "device": device,
        "figures": {name: asdict(figures(spans)) for name, spans in traces.items()},
        "kernels_a_layer": {name: len(one_layer(spans)) for name, spans in traces.items() if name != "decision"},
        "by_name": {name: by_name(spans) for name, spans in traces.items()},
        "date": now(),
        "machine": machine(),
        "versions": versions(),
        "protocol": "One replay after a warm one under torch.profiler; on a CPU the operations that were called "
        "stand for kernels.",
    }


def summary(report: Mapping[str, Any], traces: Mapping[str, list[Span]], top: int) -> str:
    """Figures of every trace, and the most expensive kernels of the decision."""
    from ..measure.tables import table
    from ..measure.timeline import short_name

    header = ("", "kernels", "products", "others a product", "kernel ms", "product ms", "gaps ms", "span ms")
    rows = [(name, *figures.values()) for name, figures in report["figures"].items()]
    kernels = [(short_name(name), count, ms) for name, count, ms in report["by_name"]["decision"][:top]]
    return "\n\n".join([table(header, rows), table(("kernel of the decision", "count", "ms"), kernels)])
