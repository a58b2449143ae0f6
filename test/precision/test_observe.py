"""Statistics of activations and the choices that follow from them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flashrt_ros.contract import SiteFormat
from flashrt_ros.ops import reference_ops
from flashrt_ros.precision.errors import CalibrationError
from flashrt_ros.precision.observe import SAMPLED_ROWS, Histogram, Observer
from flashrt_ros.precision.smoothing import choose, multiplier_for


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def watched(inputs: list[Tensor], weight: Tensor | None = None, live: int | None = None, passes: int = 1) -> Observer:
    """An observer of site "a.b" that saw `inputs`."""
    matrix = drawn(4, inputs[0].shape[1]) if weight is None else weight
    observer = Observer()
    observer.watch({"a.b": matrix}, {"a.b": len(inputs)})
    ops = observer.ops(reference_ops())
    observer.live = live
    for number in range(passes):
        if number:
            observer.multipliers = {}
        for x in inputs:
            ops.linear(x, matrix, out=torch.empty(len(x), len(matrix)))
    return observer


# -- histograms --------------------------------------------------------------------------------------------------------


def histogram(values: Tensor) -> Histogram:
    made = Histogram()
    made.add(values)
    return made


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=200), st.sampled_from([50.0, 90.0, 99.0, 100.0]))
def test_a_percentile_is_right_to_a_bin(values: list[float], percent: float) -> None:
    x = torch.tensor(values)
    got = histogram(x).percentile(percent)
    exact = float(x.abs().quantile(percent / 100, interpolation="higher"))
    lower = float(x.abs().quantile(percent / 100, interpolation="lower"))
    assert got <= float(x.abs().max())
    assert got >= lower
    assert got <= exact * 1.126 + 1e-37


def test_counts_add_up_over_calls() -> None:
    made = histogram(drawn(10, 10))
    made.add(drawn(5, 10, seed=1) * 100)
    assert int(made.counts.sum()) == 150
    assert made.largest == pytest.approx(float(drawn(5, 10, seed=1).abs().max()) * 100)


def test_shares_are_of_all_values() -> None:
    made = histogram(torch.tensor([0.0, 1e-6, 0.5, 1.0, 100.0, 200.0, 200.0, 200.0]))
    assert made.share_above(64) == 0.5
    assert made.share_above(1e9) == 0
    assert made.share_lost(1e-3) == 0.125  # the zero is not lost, it was none
    assert made.share_lost(0) == 0


# -- the observer ------------------------------------------------------------------------------------------------------


def test_queries_keys_and_values_are_seen_behind_the_product_that_makes_them() -> None:
    rows, matrix, rope = 6, drawn(4 * 8, 16), torch.randn(6, 8)
    sites = ("a.query", "a.key", "a.value")
    observer = Observer()
    observer.watch({"a.qkv": matrix}, dict.fromkeys(("a.qkv", *sites), 1), {"a.qkv": sites})
    observer.live = 4
    ops, qkv, unwatched = observer.ops(reference_ops()), torch.empty(rows, 32), torch.randn(rows, 32)
    ops.linear(drawn(rows, 16, seed=1), matrix, out=qkv)
    heads = [torch.empty(rows, count, 8) for count in (2, 1, 1)]
    ops.split_rope_write(unwatched, rope, query=heads[0], key=heads[1], value=heads[2])
    assert not set(sites) & set(observer.ranges)
    ops.split_rope_write(qkv, rope, query=heads[0], key=heads[1], value=heads[2])
    for site, tensor in zip(sites, heads, strict=True):
        assert observer.ranges[site].rows == 4
        assert torch.equal(observer.ranges[site].largest, tensor[:4].flatten(1).abs().amax(0))


def test_it_changes_nothing() -> None:
    x, weight, out, plain = drawn(3, 8), drawn(4, 8), torch.empty(3, 4), torch.empty(3, 4)
    observer = Observer()
    observer.watch({"a.b": weight}, {"a.b": 1})
    observer.ops(reference_ops()).linear(x, weight, drawn(4), activation="gelu_tanh", out=out)
    reference_ops().linear(x, weight, drawn(4), activation="gelu_tanh", out=plain)
    assert torch.equal(out, plain)


def test_ranges_and_means_are_those_of_all_rows() -> None:
    inputs = [drawn(5, 8, seed=i) for i in range(3)]
    seen = watched(inputs).check("a.b")
    everything = torch.cat(inputs).abs()
    assert torch.equal(seen.largest, everything.amax(0))
    assert torch.allclose(seen.mean, everything.mean(0))
    assert seen.rows == 15


def test_rows_that_are_not_live_do_not_count() -> None:
    x = drawn(6, 8)
    x[4:] = 1e9  # padding
    observer = watched([x], live=4, passes=2)
    assert float(observer.check("a.b").largest.max()) < 10
    assert observer.histograms["a.b"].largest < 10


def test_samples_come_from_every_call_and_are_bounded() -> None:
    seen = watched([torch.full((300, 8), float(i)) + drawn(300, 8) / 100 for i in range(8)]).check("a.b")
    assert len(seen.sample) == SAMPLED_ROWS
    assert set(seen.sample.mean(1).round().tolist()) == set(range(8))


def test_the_second_pass_sees_the_input_times_its_multiplier() -> None:
    x, weight = drawn(5, 8), drawn(4, 8)
    observer = Observer()
    observer.watch({"a.b": weight}, {"a.b": 1})
    observer.multipliers = {"a.b": torch.full((8,), 4.0)}
    observer.ops(reference_ops()).linear(x, weight, out=torch.empty(5, 4))
    assert observer.histograms["a.b"].largest == 4 * float(x.abs().max())


@pytest.mark.parametrize(("value", "said"), [(0.0, "was zero, in 6 rows"), (0.25, "was 0.25, in 6 rows")])
def test_an_input_that_never_moves_is_refused(value: float, said: str) -> None:
    observer = watched([torch.full((3, 8), value)] * 2)
    with pytest.raises(CalibrationError, match=rf"site 'a\.b': every value that entered it {said}.*Record"):
        observer.check("a.b")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_input_that_is_not_finite_is_refused(bad: float) -> None:
    x = drawn(3, 8)
    x[1, 2] = bad
    with pytest.raises(CalibrationError, match=r"site 'a\.b': its input is not finite"):
        watched([x])


def test_a_site_that_was_never_reached_is_named() -> None:
    with pytest.raises(CalibrationError, match=r"site 'c\.d' was never reached"):
        watched([drawn(3, 8)]).check("c.d")


# -- activation-aware scaling ------------------------------------------------------------------------------------------


def uneven(rows: int = 64, inputs: int = 64) -> Tensor:
    """Inputs of which one in sixteen is a hundred times as large as the others."""
    x = drawn(rows, inputs)
    x[:, ::16] *= 100
    return x


def test_uneven_inputs_are_evened_out_where_a_norm_can_take_it() -> None:
    x, weight, table = uneven(), drawn(32, 64, seed=1), SiteFormat("a.b", "nvfp4", "nvfp4")
    mean = x.abs().mean(0)
    free = choose(x, mean, weight, table, foldable=True)
    bound = choose(x, mean, weight, table, foldable=False)
    assert bound.strength == 0
    assert bound.multiplier is None
    assert free.multiplier is not None
    assert free.error < bound.error


def test_even_inputs_are_left_alone() -> None:
    x, weight = torch.ones(8, 32), drawn(16, 32)
    choice = choose(x, x.mean(0), weight, SiteFormat("a.b", "nvfp4"), foldable=True)
    assert (choice.strength, choice.multiplier) == (0, None)


@given(st.lists(st.floats(0, 2.0**60, width=32), min_size=2, max_size=32), st.sampled_from([0.25, 0.5, 1.0]))
def test_multipliers_are_powers_of_two_within_bounds(means: list[float], strength: float) -> None:
    multiplier = multiplier_for(torch.tensor(means), strength)
    mantissa, _ = torch.frexp(multiplier)
    assert bool((mantissa == 0.5).all())
    assert float(multiplier.min()) >= 2.0**-6
    assert float(multiplier.max()) <= 2.0**6


def test_inputs_that_are_always_zero_keep_a_multiplier_of_one() -> None:
    assert multiplier_for(torch.tensor([0.0, 1.0, 16.0]), 1.0)[0].item() == 1
    assert multiplier_for(torch.zeros(3), 1.0).tolist() == [1, 1, 1]


def test_a_product_that_is_zero_has_no_error() -> None:
    assert choose(drawn(4, 16), torch.ones(16), torch.zeros(2, 16), SiteFormat("a.b", "e4m3"), foldable=True).error == 0
