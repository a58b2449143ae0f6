"""The search over sets, against trying all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain, combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from flashrt_ros.accelerate.search import Outcome, Trial, search

ORIGINAL_MS = 1000.0


class Judge:
    """Additive savings; sets that contain one of `forbidden` fail."""

    def __init__(self, savings: Mapping[str, float], forbidden: set[frozenset[str]]) -> None:
        self.savings, self.forbidden = savings, forbidden
        self.tried: list[tuple[str, ...]] = []

    def time(self, names: tuple[str, ...]) -> float | None:
        if any(bad <= set(names) for bad in self.forbidden):
            return None
        return ORIGINAL_MS - sum(self.savings[name] for name in names)

    def __call__(self, names: tuple[str, ...]) -> Trial:
        self.tried.append(names)
        ms = self.time(names)
        return Trial(names, ms, "" if ms is not None else "fails together")


def never(a: str, b: str) -> bool:
    return False


def run(judge: Judge, conflicts: Callable[[str, str], bool] = never, most: int = 64) -> Outcome:
    return search(judge.savings, conflicts, ORIGINAL_MS, judge, most)


def test_all_together_is_one_trial_where_it_passes() -> None:
    judge = Judge({"a": 100, "b": 200, "c": 50}, set())
    assert set(run(judge).best) == {"a", "b", "c"}
    assert len(judge.tried) == 1


def test_a_pair_that_fails_together_is_split_the_better_way() -> None:
    judge = Judge({"a": 100, "b": 200, "c": 150}, {frozenset("ab")})
    outcome = run(judge)
    assert set(outcome.best) == {"b", "c"}
    assert [set(names) for names in judge.tried] == [{"a", "b", "c"}, {"b", "c"}]
    assert outcome.trials[0].failure == "fails together"


def test_three_that_fail_only_together() -> None:
    judge = Judge({"a": 100, "b": 90, "c": 80}, {frozenset("abc")})
    assert set(run(judge).best) == {"a", "b"}


def test_candidates_that_conflict_are_never_tried_together() -> None:
    judge = Judge({"a": 100, "b": 90, "c": 80}, set())
    outcome = run(judge, lambda a, b: {a, b} == {"a", "b"})
    assert set(outcome.best) == {"a", "c"}
    assert not any({"a", "b"} <= set(names) for names in judge.tried)


def test_nothing_to_search() -> None:
    assert run(Judge({}, set())) == Outcome((), (), True)


def test_where_nothing_passes_everything_was_tried() -> None:
    judge = Judge({"a": 1, "b": 2}, {frozenset("a"), frozenset("b")})
    outcome = run(judge)
    assert outcome.best == ()
    assert outcome.exhausted
    assert len(judge.tried) == 3


def test_the_bound_is_kept_and_told() -> None:
    names = "abcdefgh"
    judge = Judge(dict.fromkeys(names, 10.0), {frozenset(name) for name in names})
    outcome = run(judge, most=9)
    assert len(judge.tried) == 9
    assert not outcome.exhausted
    whole = Judge(dict.fromkeys(names, 10.0), {frozenset(name) for name in names})
    assert run(whole, most=255).exhausted
    assert len(whole.tried) == 2**8 - 1


def test_a_set_that_disappoints_does_not_hide_a_better_one() -> None:
    class Slow(Judge):
        def time(self, names: tuple[str, ...]) -> float | None:
            return 950.0 if set(names) == {"a", "b"} else super().time(names)  # promised 700

    assert run(Slow({"a": 200, "b": 100}, set())).best == ("a",)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=6),
    st.sets(st.frozensets(st.integers(0, 5), min_size=1, max_size=3), max_size=6),
)
def test_it_finds_what_trying_everything_finds(amounts: list[int], forbidden: set[frozenset[int]]) -> None:
    names = [f"c{index}" for index in range(len(amounts))]
    judge = Judge(
        dict(zip(names, map(float, amounts), strict=True)), {frozenset(f"c{i}" for i in s) for s in forbidden}
    )
    every = chain.from_iterable(combinations(names, size) for size in range(1, len(names) + 1))
    times = [time for time in map(judge.time, every) if time is not None]
    outcome = run(judge)
    found = judge.time(outcome.best) if outcome.best else None
    assert (found is None) == (not times)
    if found is not None:
        assert found <= min(times) * 1.02
