"""Which set of candidates is the best that passes: a best-first search over sets, with a bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations

_WORTH = 1.02  # a set that could be at most 2 % faster than the best one is not looked for


@dataclass(frozen=True)
class Trial:
    """One set that was tried: its names, its time if both gates let it through, the failure otherwise."""

    names: tuple[str, ...]
    ms: float | None
    failure: str = ""


@dataclass(frozen=True)
class Outcome:
    """The result of a search.

    Attributes:
        best: names of the fastest passing set; empty if none passes.
        trials: every set that was tried, in order.
        exhausted: False if sets that could have been faster were left untried because of the limit.
    """

    best: tuple[str, ...]
    trials: tuple[Trial, ...]
    exhausted: bool


def search(
    savings: Mapping[str, float],
    conflicts: Callable[[str, str], bool],
    original_ms: float,
    trial: Callable[[tuple[str, ...]], Trial],
    most_sets: int,
) -> Outcome:
    """Try sets of candidates that each passed alone, the most promising first.

    A set promises the original's time less what each of its members saved alone. Sets of candidates that conflict are
    left out. Sets are tried in the order of their promise, larger ones first where two promise the same; each is judged
    by both gates as a whole, so a set that fails together although its members pass alone is seen, and the next ones,
    its subsets among them, get their turn. The search ends when no untried set promises to be 2 % faster than the best
    one that passed.

    Bound: with n candidates at most min(2^n - 1, `most_sets`) sets are tried. Up to `most_sets` the answer is the best
    one for savings that do not help each other; a set that is faster together than its members' savings add up to can
    be missed.

    Args:
        savings: milliseconds that each candidate saved alone.
        trial: judges one set.
    """
    names = tuple(savings)
    promised = _promises(names, savings, conflicts, original_ms, most_sets)
    best: Trial | None = None
    trials: list[Trial] = []
    for promise, chosen in promised:
        if best is not None and best.ms is not None and best.ms <= promise * _WORTH:
            return Outcome(best.names, tuple(trials), True)
        if len(trials) == most_sets:
            return Outcome(best.names if best else (), tuple(trials), False)
        result = trial(chosen)
        trials.append(result)
        if result.ms is not None and (best is None or best.ms is None or result.ms < best.ms):
            best = result
    return Outcome(best.names if best else (), tuple(trials), True)


_MOST_ENUMERATED = 14  # 2^14 sets are listed in milliseconds; beyond, only the largest savers combine freely


def _promises(
    names: tuple[str, ...],
    savings: Mapping[str, float],
    conflicts: Callable[[str, str], bool],
    original_ms: float,
    most_sets: int,
) -> list[tuple[float, tuple[str, ...]]]:
    """(promised ms, set) of every set without a conflict, the most promising first."""
    ranked = sorted(names, key=lambda name: -savings[name])[:_MOST_ENUMERATED]
    rest = [(name,) for name in names if name not in ranked]
    sets = [chosen for size in range(1, len(ranked) + 1) for chosen in combinations(ranked, size)]
    clashes = {pair for pair in combinations(ranked, 2) if conflicts(*pair)}
    free = [chosen for chosen in (*sets, *rest) if not clashes & set(combinations(chosen, 2))]
    promised = [(original_ms - sum(savings[name] for name in chosen), chosen) for chosen in free]
    return sorted(promised, key=lambda pair: (pair[0], -len(pair[1]), pair[1]))[: most_sets + 1]
