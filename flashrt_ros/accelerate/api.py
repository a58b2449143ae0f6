"""Discover, prepare, gate, activate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from . import latency, parity
from .calls import CompleteCall, carries_gradients, complete_call
from .candidates import FAILURES, Candidate, Live, prepare, release
from .device import blaming
from .errors import AccelerateError, ReceiptError, first_line
from .gates import Gates
from .identity import environment, model_identity
from .latency import Latency
from .observe import observe
from .parity import Parity
from .receipt import KEPT, REFUSED, Receipt, Verdict
from .registry import available_structures
from .report import MARK, Report
from .search import Outcome, Trial, search
from .structure import KINDS, Scene, Structure

_ORIGINAL = "the original model"
DEFAULT_KINDS = tuple(kind for kind in KINDS if kind != "compile")
Progress = Callable[[int, int, str], None]
"""Called with the steps done, the steps in all as far as known, and what is done next."""
Told = Callable[[str, str], None]
"""Called with the name of a candidate, or the names of a set, and what was found out, as soon as that is known."""


def accelerate(
    model: nn.Module,
    example_inputs: Sequence[Any],
    *,
    method: str = "forward",
    gates: Gates | None = None,
    kinds: Iterable[str] = DEFAULT_KINDS,
    progress: Progress | None = None,
    told: Told | None = None,
) -> Report:
    """Make `model.method(...)` faster where that is proven to pay and to agree, and leave it alone where it is not.

    Args:
        model: unmodified, on the device and in the mode (`eval()`) in which it will be used.
        example_inputs: complete calls, as different from each other as real ones: tuples of positional arguments,
            mappings of keyword arguments, or pairs of both. Only calls of their shapes will be accelerated.
        method: the complete call, such as "sample_actions"; "forward" is `model(...)`.
        gates: limits of parity and latency.
        kinds: kinds of structures to consider; "compile" has to be asked for.
        progress: told about every step.
        told: told about every verdict, and about every set that was tried.

    Returns:
        A report. The model is accelerated until `report.detach()` or the end of a `with` block; nothing is changed
        where `report.kept` is empty.

    Raises:
        AccelerateError: the model, the method, the examples or a kind are not what is expected.
        DeviceFaultError: a candidate broke the device; the message names it.
    """
    job = _job(model, example_inputs, method, gates or Gates(), tuple(kinds), progress, told)
    offered = [structure for structure in available_structures() if structure.kind in job.kinds]
    graphs, others = job.prepared(offered)
    base = job.judge_graphs(graphs)
    for candidate in others:
        job.judge(candidate, base)
    outcome = job.best_set()
    live = job.finish(outcome)
    return Report(job.call, job.receipt(outcome), live)


def replay(
    model: nn.Module, receipt: Receipt | str | Path, example_inputs: Sequence[Any], *, method: str = "forward"
) -> Report:
    """Activate what a receipt kept, without a search. Parity on the examples is checked once more.

    Raises:
        ReceiptError: the receipt was edited, or is about other weights, examples or another environment; its `field`
            says which. Also where what it kept does not pass the parity gate any more.
    """
    known = receipt if isinstance(receipt, Receipt) else Receipt.load(receipt)
    job = _job(model, example_inputs, method, Gates(**known.gates), KINDS)
    known.check(job.identity, environment())
    wanted = [structure for structure in available_structures() if structure.name in known.kept]
    graphs, others = job.prepared(wanted)
    for name in known.kept:
        candidate = job.candidates.get(name)
        refusal = "this installation does not have it" if candidate is None else candidate.refusal
        if refusal:
            raise ReceiptError(f"'{name}' is in the receipt, but {refusal}", name)
    with blaming(f"what the receipt kept ({' + '.join(known.kept)})", job.call.device):
        live = job.live((*graphs, *others))
        found = job.parity(live)
    if not found.passed:
        raise ReceiptError(f"what the receipt kept is not the original any more: {found.failure}", "result")
    return Report(job.call, known, live)


def _job(
    model: nn.Module,
    example_inputs: Sequence[Any],
    method: str,
    gates: Gates,
    kinds: tuple[str, ...],
    progress: Progress | None = None,
    told: Told | None = None,
) -> _Job:
    call = complete_call(model, method, example_inputs)
    if MARK in vars(model):
        raise AccelerateError("the model is accelerated already; detach it first (report.detach())")
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise AccelerateError(f"unknown kind '{unknown[0]}'; there are: {', '.join(KINDS)}")
    return _Job(call, gates, kinds, progress or (lambda done, total, text: None), told or (lambda name, found: None))


@dataclass
class _Job:
    call: CompleteCall
    gates: Gates
    kinds: tuple[str, ...]
    progress: Progress
    told: Told
    candidates: dict[str, Candidate] = field(default_factory=dict)
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    passed: dict[str, float] = field(default_factory=dict)  # milliseconds that each saves alone
    done: int = 0
    final: tuple[Parity, Latency] | None = None
    original_ms: float = 0.0

    def __post_init__(self) -> None:
        self._say("running the original")
        self.identity = model_identity(self.call)
        with blaming(_ORIGINAL, self.call.device):
            self.originals = self.call.results()
            _demand_finite_repeat(self.call, self.originals, self.gates)
            self.graded = carries_gradients(self.call)
        self._lives: dict[tuple[str, ...], Live] = {}
        self._baselines: dict[tuple[str, ...], Live] = {}

    # -- discover and prepare ------------------------------------------------------------------------------------------

    def prepared(self, offered: Sequence[Structure]) -> tuple[list[Candidate], list[Candidate]]:
        """Candidates with something to judge: those that are built for each set, and the others."""
        self._say("looking for structures")
        possible = [structure for structure in offered if not structure.available(self.call.device)]
        with blaming(_ORIGINAL, self.call.device):
            self.scene: Scene = observe(self.call, possible)
        for structure in offered:
            self._say(f"preparing {structure.name}")
            with blaming(f"candidate '{structure.name}', while it was prepared,", self.call.device):
                candidate = self.candidates[structure.name] = prepare(structure, self.scene)
            if candidate.refusal:
                self._refuse(candidate, candidate.refusal)
        self.scene.forget()
        ready = [candidate for candidate in self.candidates.values() if not candidate.refusal]
        return [c for c in ready if c.structure.per_set], [c for c in ready if not c.structure.per_set]

    # -- gate ----------------------------------------------------------------------------------------------------------

    def judge_graphs(self, graphs: Sequence[Candidate]) -> Candidate | None:
        """Judge each graph alone; the one that passed and saves most, if any, is what the others are judged within."""
        for candidate in graphs:
            self.judge(candidate, None)
        passed = [candidate for candidate in graphs if candidate.name in self.passed]
        return max(passed, key=lambda candidate: self.passed[candidate.name], default=None)

    def judge(self, candidate: Candidate, base: Candidate | None) -> None:
        """Judge one candidate alone, within `base` if it can be."""
        self._say(f"judging {candidate.name}")
        around = [base] if base is not None and not base.conflicts(candidate) else []
        against = around[0].name if around else "original"
        with blaming(f"candidate '{candidate.name}'{f' within {against!r}' if around else ''}", self.call.device):
            self._judge_against(candidate, around, against)

    def _judge_against(self, candidate: Candidate, around: Sequence[Candidate], against: str) -> None:
        try:
            found, timed = self.measured(self.live((candidate, *around)), self._baseline(around))
        except FAILURES as error:
            self._refuse(candidate, first_line(error), against)
            return
        failure = found.failure or (timed.failure if timed else "")
        if not failure and timed is not None:
            self.passed[candidate.name] = timed.baseline_ms - timed.ms
        self._note(candidate, REFUSED, failure or "passes alone", against, found, timed)

    def _baseline(self, around: Sequence[Candidate]) -> Live:
        """The form that candidates are judged against; a graph of it is captured once."""
        names = tuple(candidate.name for candidate in around)
        if names not in self._baselines:
            self._baselines[names] = self.live(around)
        return self._baselines[names]

    def measured(self, live: Live, baseline: Live) -> tuple[Parity, Latency | None]:
        """Both gates; the second only where the first is passed."""
        found = self.parity(live)
        if not found.passed:
            return found, None
        return found, latency.compare(self.call.in_turn(), baseline.form, live.form, self.gates, self.call.device)

    def parity(self, live: Live) -> Parity:
        """The parity gate on every example."""
        with live.form():
            results = self.call.results()
        return parity.compare(results, self.originals, self.gates)

    def best_set(self) -> Outcome:
        """Search among everything that passed alone."""
        self._baselines.clear()
        if self.passed:
            form = self.live(()).form
            with blaming(_ORIGINAL, self.call.device):
                self.original_ms = latency.typical_ms(self.call.in_turn(), form, self.gates, self.call.device)

        def conflicts(a: str, b: str) -> bool:
            return self.candidates[a].conflicts(self.candidates[b])

        return search(self.passed, conflicts, self.original_ms, self._trial, self.gates.most_sets)

    def _trial(self, names: tuple[str, ...]) -> Trial:
        self._say(f"judging together: {', '.join(names)}")
        together = " + ".join(names)
        with blaming(f"the set {together}", self.call.device):
            trial = self._tried(names)
        self.told(together, trial.failure or f"passes: {trial.ms:.4g} ms")
        return trial

    def _tried(self, names: tuple[str, ...]) -> Trial:
        try:
            live = self.live(self.candidates[name] for name in names)
            found, timed = self.measured(live, self.live(()))
        except FAILURES as error:
            return Trial(names, None, first_line(error))
        failure = found.failure or (timed.failure if timed else "")
        if failure or timed is None:
            return Trial(names, None, failure)
        if self.final is None or timed.ms < self.final[1].ms:
            self._lives = {names: live}
            self.final = (found, timed)
        release(self.call.device)
        return Trial(names, timed.ms)

    # -- activate ------------------------------------------------------------------------------------------------------

    def live(self, candidates: Iterable[Candidate]) -> Live:
        """The model with `candidates` in it, switched off."""
        return Live(self.scene, candidates, self.gates.misses, self.graded)

    def finish(self, outcome: Outcome) -> Live:
        """Write the last verdicts; the live set that is to be switched on."""
        failures = {trial.names: trial.failure for trial in outcome.trials if trial.failure}
        for name in self.passed:
            verdict = self.verdicts[name]
            kept = name in outcome.best
            reason = "in the best set that passes" if kept else _why_not(name, outcome, failures)
            final = Verdict(**{**vars(verdict), "verdict": KEPT if kept else REFUSED, "reason": reason})
            self.verdicts[name] = final
            self.told(name, f"{final.verdict}: {reason}")
        self._say("done")
        return self._lives.get(outcome.best) or self.live(())

    def receipt(self, outcome: Outcome) -> Receipt:
        """Everything that was found out."""
        final_parity, final_latency = self.final or (None, None)
        trials = [vars(trial) | {"names": list(trial.names)} for trial in outcome.trials]
        return Receipt(
            model=self.identity,
            environment=environment(),
            gates=self.gates.to_dict(),
            candidates=tuple(self.verdicts.values()),
            search={"exhausted": outcome.exhausted, "tried": trials},
            result={
                "kept": list(outcome.best),
                "parity": final_parity.to_dict() if final_parity else None,
                "latency": final_latency.to_dict() if final_latency else None,
            },
        )

    def _refuse(self, candidate: Candidate, reason: str, against: str = "original") -> None:
        self._note(candidate, REFUSED, reason, against, None, None)

    def _note(
        self, candidate: Candidate, verdict: str, reason: str, against: str, found: Parity | None, timed: Latency | None
    ) -> None:
        self.verdicts[candidate.name] = Verdict(
            name=candidate.name,
            kind=candidate.structure.kind,
            verdict=verdict,
            reason=reason,
            sites=tuple(site.name for site in candidate.sites),
            dropped=candidate.dropped,
            against=against,
            parity=found.to_dict() if found else None,
            latency=timed.to_dict() if timed else None,
        )
        gain = f": {timed.speedup:.3f} times as fast as {against}" if timed and timed.passed else ""
        self.told(candidate.name, reason + gain)

    def _say(self, text: str) -> None:
        ready = [candidate for candidate in self.candidates.values() if not candidate.refusal]
        total = 3 + len(self.candidates) + 2 * len(ready)
        self.progress(min(self.done, total), total, text)
        self.done += 1


def _why_not(name: str, outcome: Outcome, failures: dict[tuple[str, ...], str]) -> str:
    """Why a candidate that passes alone is not kept."""
    together = [(names, why) for names, why in failures.items() if name in names]
    if together:
        names, why = together[0]
        return f"passes alone, but {' + '.join(names)} fails: {why}"
    best = " + ".join(outcome.best) or "no set"
    return f"passes alone, but the best set that passes is {best}"


def _demand_finite_repeat(call: CompleteCall, originals: list[Any], gates: Gates) -> None:
    """AccelerateError unless the original agrees with itself: where it does not, nothing can be compared with it."""
    again = parity.compare(call.results(), originals, gates)
    if not again.passed:
        raise AccelerateError(
            f"the original gives another result when it is called again with equal inputs and random seed "
            f"({again.failure}); state that one call leaves to the next, or a random generator of its own, must be "
            "made an argument first"
        )
