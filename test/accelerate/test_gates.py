"""What the two gates let through."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from flashrt_ros.accelerate import Gates
from flashrt_ros.accelerate.latency import interval, judged
from flashrt_ros.accelerate.parity import compare

GATES = Gates()


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


ORIGINAL = [draw(1, 50, 8, seed=seed) for seed in range(4)]


def test_equal_results_pass() -> None:
    parity = compare([x.clone() for x in ORIGINAL], ORIGINAL, GATES)
    assert parity.passed
    assert parity.cosine_global == pytest.approx(1, abs=1e-12)
    assert parity.dimension_error == 0


def test_rounding_to_bfloat16_passes() -> None:
    assert compare([x.bfloat16().float() for x in ORIGINAL], ORIGINAL, GATES).passed


def test_a_wrong_direction_fails_globally() -> None:
    noisy = [x + 0.03 * draw(*x.shape, seed=9) for x in ORIGINAL]
    assert compare(noisy, ORIGINAL, GATES).failure.startswith("global cosine is 0.999")


def test_one_bad_example_among_good_ones_fails() -> None:
    results = [ORIGINAL[0], ORIGINAL[1] + 0.035 * draw(1, 50, 8, seed=9), *ORIGINAL[2:]]
    loose = Gates(cosine_global=0.999)
    parity = compare(results, ORIGINAL, loose)
    assert parity.cosine_global > 0.9998
    assert parity.failure.startswith("cosine of example 1 is 0.999")


def test_one_wrong_dimension_among_many_fails() -> None:
    wide = [draw(1, 50, 512, seed=seed) for seed in range(2)]
    results = [x.clone() for x in wide]
    for result in results:
        result[..., 77] *= 1.06  # what no cosine sees: 1 - 3.5e-6
    parity = compare(results, wide, GATES)
    assert parity.cosine_global > 0.99999
    assert parity.dimension == "0[77]"
    assert parity.dimension_error == pytest.approx(0.06, rel=1e-5)
    assert parity.failure.startswith("relative error of dimension 0[77] is 0.0")


def test_a_wrong_scale_fails_although_every_cosine_is_one() -> None:
    parity = compare([x * 1.1 for x in ORIGINAL], ORIGINAL, GATES)
    assert parity.cosine_worst == pytest.approx(1)
    assert "relative error of dimension" in parity.failure


def test_rounding_in_a_dimension_that_is_almost_zero_passes() -> None:
    small = [x * torch.tensor([1.0] * 7 + [1e-6]) for x in ORIGINAL]
    results = [x + 1e-6 * draw(*x.shape, seed=5) * torch.tensor([0.0] * 7 + [1.0]) for x in small]
    assert compare(results, small, GATES).passed


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("example", range(4))
def test_one_value_that_is_not_finite_fails(bad: float, example: int) -> None:
    results = [x.clone() for x in ORIGINAL]
    results[example][0, 3, 2] = bad
    parity = compare(results, ORIGINAL, GATES)
    assert parity.failure == f"example {example}: output 0 has values that are not finite where the original's are"
    assert parity.to_dict()["dimension_error"] is None


def test_a_mask_of_infinities_equals_itself_and_no_other() -> None:
    mask = torch.zeros(2, 4).masked_fill(torch.eye(2, 4, dtype=torch.bool), -math.inf)
    original = [(mask, draw(2, 4))]
    assert compare([(mask.clone(), original[0][1])], original, GATES).passed
    assert not compare([(mask.roll(1, 1), original[0][1])], original, GATES).passed


def test_whole_numbers_must_be_equal() -> None:
    tokens = torch.arange(5)
    assert compare([(tokens, draw(3))], [(tokens, draw(3))], GATES).passed
    assert compare([(tokens + 1, draw(3))], [(tokens, draw(3))], GATES).failure == (
        "example 0: output 0 (torch.int64) differs"
    )


def test_another_shape_dtype_or_number_of_outputs_fails() -> None:
    x = draw(2, 3)
    assert "expected torch.float32[2, 3]" in compare([x[:1]], [x], GATES).failure
    assert "output 0 is torch.float64[2, 3]" in compare([x.double()], [x], GATES).failure
    assert compare([(x, x)], [(x,)], GATES).failure == "example 0: 2 tensors come back, expected 1"


def test_zeros_equal_zeros_and_nothing_else() -> None:
    zeros = torch.zeros(3, 4)
    assert compare([zeros.clone()], [zeros], GATES).passed
    assert not compare([zeros + 1e-3], [zeros], GATES).passed
    assert not compare([zeros], [zeros + 1e-3], GATES).passed


# -- latency -----------------------------------------------------------------------------------------------------------


def rounds(*ratios: float) -> list[tuple[float, float]]:
    return [(ratio * 2.0, 2.0) for ratio in ratios]


def test_clearly_faster_passes() -> None:
    latency = judged(rounds(*[1.5] * 11), GATES)
    assert latency.passed
    assert (latency.speedup, latency.low, latency.baseline_ms, latency.ms) == (1.5, 1.5, 3.0, 2.0)


def test_one_slow_round_does_not_decide() -> None:
    assert judged(rounds(*[1.2] * 10, 0.1), GATES).passed


def test_a_gain_below_the_limit_fails() -> None:
    assert judged(rounds(*[1.01] * 11), GATES).failure == "1.010 times the original's speed, 1.02 are needed"


def test_a_median_above_the_limit_fails_where_its_interval_has_one_in_it() -> None:
    latency = judged(rounds(0.8, 0.9, 0.95, 1.1, 1.1, 1.1, 1.1, 1.1, 1.2, 1.2, 1.2), GATES)
    assert latency.speedup == 1.1
    assert "the interval 0.900 to 1.200 has 1 in it" in latency.failure


def test_the_interval_holds_as_often_as_it_says() -> None:
    generator = torch.Generator().manual_seed(0)
    for count in (6, 9, 11, 25):
        draws = torch.rand(4000, count, generator=generator).square().sort(dim=1).values  # skewed; median 0.25
        held = sum(low <= 0.25 <= high for low, high in (interval(row.tolist(), 0.95) for row in draws))
        assert 0.94 < held / 4000 <= 1


def test_more_rounds_narrow_the_interval() -> None:
    widths = []
    for count in (6, 11, 21, 41):
        low, high = interval([index / (count - 1) for index in range(count)], 0.95)
        widths.append(high - low)
    assert all(a >= b for a, b in pairwise(widths))
    assert interval([1.0] * 5, 0.95) == (0.0, math.inf)
