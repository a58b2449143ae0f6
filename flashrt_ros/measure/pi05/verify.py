"""Parity with the official implementation: the same files, pixels, tokens and noise through three models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...engine import exact_float32
from ...policies.pi05.config import Pi05Config
from ..circumstances import machine, now, versions
from ..parity import COSINE_GLOBAL, COSINE_WORST, Distances, LayerErrors, distances, failures
from ..tables import table
from .observations import Observation, Pixels, make_observations
from .official import Official
from .ours import Ours

Say = Callable[[str], None]
OURS, OFFICIAL = "ours", "official bfloat16"

PROTOCOL = (
    "The same checkpoint files, raw photographs (each side letterboxes and normalises them itself), tokens and noise. "
    "Reference: LeRobot's model in float32 without TF32. One in four prompts is drawn from the whole vocabulary, the "
    "others are instructions with a random state. Cosines and relative errors over all padded action dimensions."
)


@dataclass
class Gathered:
    """Action chunks of three models, by number of steps, and the errors of keys and values."""

    reference: dict[int, list[np.ndarray]] = field(default_factory=dict)
    chunks: dict[str, dict[int, list[np.ndarray]]] = field(default_factory=lambda: {OURS: {}, OFFICIAL: {}})
    noise: list[np.ndarray] = field(default_factory=list)
    layers: dict[str, LayerErrors] = field(default_factory=lambda: {OURS: LayerErrors(), OFFICIAL: LayerErrors()})

    def distances(self, model: str) -> dict[int, Distances]:
        """By number of steps, how far `model` is from the reference."""
        noise = np.stack(self.noise)
        return {
            steps: distances(np.stack(chunks), np.stack(self.reference[steps]), noise)
            for steps, chunks in self.chunks[model].items()
        }


@dataclass(frozen=True)
class Models:
    """LeRobot's model in float32 and in its own 16-bit precision."""

    exact: Official
    rounded: Official


@dataclass(frozen=True)
class Plan:
    """What is compared.

    Attributes:
        settings: of our policy, with the checkpoint; views and steps are added here.
        views: numbers of views; observations are spread over them evenly.
        steps: numbers of Euler steps.
        observations: how many in all.
    """

    settings: Mapping[str, Any]
    device: str = "cpu"
    views: Sequence[int] = (1, 2, 3)
    steps: Sequence[int] = (1, 2, 10)
    observations: int = 24
    seed: int = 0


def verify(plan: Plan, pictures: Sequence[Pixels], whole: Pi05Config, say: Say = lambda text: None) -> dict[str, Any]:
    """Run the comparison; the report's `failures` is empty if everything is at or above the bar.

    Args:
        whole: the configuration of the checkpoint with all its views.
        say: told what is being done, for a run that takes minutes.
    """
    device = torch.device(plan.device)
    folder = Path(str(plan.settings["checkpoint"]))
    gathered = Gathered()
    with exact_float32():
        say("loading LeRobot's model in float32 and in bfloat16")
        models = Models(*(Official(folder, whole, dtype, device) for dtype in ("float32", "bfloat16")))
        counts: list[int] = []
        for index, views in enumerate(plan.views):
            count = plan.observations // len(plan.views) + (index < plan.observations % len(plan.views))
            counts.append(count)
            say(f"{count} observations of {views} view{'s' if views > 1 else ''}")
            _compare(plan, list(whole.views[:views]), count, plan.seed + index, pictures, models, gathered)
    return _report(plan, counts, gathered)


def _compare(
    plan: Plan, views: list[str], count: int, seed: int, pictures: Sequence[Pixels], models: Models, gathered: Gathered
) -> None:
    """Observations of the same cameras, by every number of steps."""
    observations: list[Observation] = []
    for place, steps in enumerate(plan.steps):
        ours = Ours.start({**plan.settings, "views": views, "steps": steps}, plan.device)
        observations = observations or make_observations(ours.policy, count, pictures, seed)
        for observation in observations:
            _decide(ours, models, observation, steps, gathered, first=place == 0)
        ours.close()


def _decide(
    ours: Ours, models: Models, observation: Observation, steps: int, gathered: Gathered, *, first: bool
) -> None:
    """One observation through the three models; keys and values don't depend on steps, so they count once."""
    reference, reference_rows = models.exact.decide_and_record(models.exact.inputs(observation), steps)
    official, official_rows = models.rounded.decide_and_record(models.rounded.inputs(observation), steps)
    own = ours.decide(observation)
    gathered.reference.setdefault(steps, []).append(reference[0].float().cpu().numpy())
    gathered.chunks[OFFICIAL].setdefault(steps, []).append(official[0].float().cpu().numpy())
    gathered.chunks[OURS].setdefault(steps, []).append(own)
    if first:
        gathered.noise.append(observation.noise)
        gathered.layers[OURS].add(ours.key_value(), reference_rows)
        gathered.layers[OFFICIAL].add(official_rows, reference_rows)


def _report(plan: Plan, counts: Sequence[int], gathered: Gathered) -> dict[str, Any]:
    by_model = {model: gathered.distances(model) for model in (OURS, OFFICIAL)}
    return {
        "failures": failures(by_model[OURS], by_model[OFFICIAL]),
        "bar": {"cosine_global": COSINE_GLOBAL, "cosine_worst": COSINE_WORST},
        "settings": {name: value for name, value in plan.settings.items() if name != "tokenizer"},
        "device": plan.device,
        "observations": {f"{views} views": count for views, count in zip(plan.views, counts, strict=True)},
        "steps": {
            str(steps): {model: by_model[model][steps].to_dict() for model in by_model} for steps in plan.steps
        },
        "key_value": {model: errors.to_list() for model, errors in gathered.layers.items()},
        "date": now(),
        "machine": machine(),
        "versions": versions(),
        "protocol": PROTOCOL,
    }  # fmt: skip


def summary(report: Mapping[str, Any]) -> str:
    """The report as tables, with the verdict last."""
    rows = [
        (f"{steps} steps, {model}", *(f"{d[name]:.7f}" for name in ("cosine_global", "cosine_worst", "cosine_flow")),
         d["relative_error"], max(d["max_abs_per_dim"]))
        for steps, models in report["steps"].items()
        for model, d in models.items()
    ]  # fmt: skip
    header = ("distance from float32", "cosine", "worst", "of the flow", "relative error", "largest")
    last = report["steps"][max(report["steps"], key=int)]
    dims = [(f"action {i}", *(last[model]["max_abs_per_dim"][i] for model in last)) for i in range(_width(last))]
    layers = report["key_value"]
    errors = [
        (f"layer {i}", *(layers[model][i][part] for part in ("key", "value") for model in layers))
        for i in range(len(layers[OURS]))
    ]
    parts = [
        table(header, rows),
        table(("largest difference", *last), dims, title=f"{max(report['steps'], key=int)} steps"),
        table(("relative error", "K ours", "K official", "V ours", "V official"), errors),
        "\n".join(f"BELOW THE BAR: {text}" for text in report["failures"]) or "at or above the bar",
    ]
    return "\n\n".join(parts)


def _width(models: Mapping[str, Any]) -> int:
    return len(models[OURS]["max_abs_per_dim"])
