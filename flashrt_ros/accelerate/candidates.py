"""From structures that fit to candidates that can be switched on and off."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ..engine import EngineError
from ..ops import ShapeError
from ..ops.cuda.errors import KernelError
from .calls import seeded
from .errors import AccelerateError, first_line
from .guards import Guard, Guarded, Tally
from .patches import Call, Patch
from .structure import Match, Scene, Site, Structure, Unsuitable, below
from .weights import WeightWatch, weights_of

FAILURES = (AccelerateError, Unsuitable, KernelError, ShapeError, EngineError, RuntimeError, NotImplementedError)
"""What preparing or trying a candidate may raise; it then counts as refused, with the error as the reason."""


@dataclass
class Candidate:
    """One structure at every place where it fits and could be prepared.

    Attributes:
        matches: with the calls that were made for each (None for structures that build them for each set).
        dropped: places where it fits but could not be prepared, and parts of a replacement that are not the fastest
            ones (its `notes`), with the reason.
        refusal: why there is nothing to judge; empty if there is something.
    """

    structure: Structure
    matches: list[tuple[Match, Sequence[Call] | None]] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    refusal: str = ""

    @property
    def name(self) -> str:
        """The structure's name."""
        return self.structure.name

    @property
    def sites(self) -> list[Site]:
        """Everything that it replaces."""
        return [site for match, _ in self.matches for site in match.sites]

    def conflicts(self, other: Candidate) -> bool:
        """Whether both cannot be active: one lies within the other, or cannot be captured by it.

        A graph is around everything else, so it conflicts only with what cannot be captured and with other graphs.
        """
        graphs = [c for c in (self, other) if c.structure.per_set]
        if graphs:
            return len(graphs) == 2 or not (self.structure.capturable and other.structure.capturable)
        return any(below(a.path, b.path) or below(b.path, a.path) for a in self.sites for b in other.sites)


def prepare(structure: Structure, scene: Scene) -> Candidate:
    """Find and prepare every match of `structure`."""
    candidate = Candidate(structure)
    candidate.refusal = structure.available(scene.device)
    if candidate.refusal:
        return candidate
    for match in structure.find(scene):
        try:
            with seeded(0, scene.device):
                calls = None if structure.per_set else match.build()
            candidate.matches.append((match, calls))
            for call in calls or ():
                candidate.dropped |= getattr(call, "notes", {})
        except FAILURES as error:
            candidate.dropped[", ".join(site.name for site in match.sites)] = first_line(error)
    if not candidate.matches:
        reasons = sorted(set(candidate.dropped.values()))
        candidate.refusal = f"cannot be prepared: {reasons[0]}" if reasons else "nothing in the model fits"
    return candidate


class Live:
    """A model with a set of candidates in it, which can be switched off and on again.

    Args:
        patience: calls outside a guard in a row after which a site detaches itself.
        graded: whether the complete call carries gradients where they are enabled.
    """

    def __init__(self, scene: Scene, candidates: Iterable[Candidate], patience: int, graded: bool) -> None:
        self.candidates = tuple(candidates)
        self.device = scene.device
        self._scene, self._patience, self._graded = scene, patience, graded
        self._patches: list[Patch] = []
        self.guarded: list[Guarded] = []
        self.enabled = False
        for candidate in sorted(self.candidates, key=lambda candidate: candidate.structure.per_set):
            for match, calls in candidate.matches:
                self._add(match, calls)

    def _add(self, match: Match, calls: Sequence[Call] | None) -> None:
        if calls is None:
            with self.form(), seeded(0, self.device):  # runs the call; nobody's random numbers are used up
                calls = match.build()
        watch = WeightWatch(weights_of(match.weights))
        self._patches += watch.patches
        for site, call in zip(match.sites, calls, strict=True):
            guarded = Guarded(site.name, self._guard(site, watch), call, self._patience)
            self.guarded.append(guarded)
            self._patches.append(Patch(site.module, site.method, _putting(guarded)))

    def _guard(self, site: Site, watch: WeightWatch) -> Guard:
        whole = site == self._scene.root
        accepted = self._scene.signatures(site)
        return Guard(site.module, accepted, watch, graded=self._graded or not whole)

    @property
    def tallies(self) -> list[Tally]:
        """What the guards counted."""
        return [guarded.tally for guarded in self.guarded]

    def enable(self) -> None:
        """Put everything on."""
        for patch in self._patches:
            patch.apply()
        self.enabled = True

    def disable(self) -> None:
        """Take everything off: the model is bit for bit what it was."""
        for patch in reversed(self._patches):
            patch.remove()
        self.enabled = False

    @contextmanager
    def form(self) -> Iterator[None]:
        """On within the block."""
        self.enable()
        try:
            yield
        finally:
            self.disable()


def _putting(guarded: Guarded) -> Callable[[Call], Call]:
    def make(original: Call) -> Call:
        guarded.original = original
        return guarded

    return make


def release(device: torch.device) -> None:
    """Give memory of dropped candidates back."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
