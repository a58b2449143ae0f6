"""The comparison core: figures and verdict on arrays that are known to be right, near, or wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from flashrt_ros.measure.parity import COSINE_WORST, Distances, LayerErrors, cosine, distances, failures

GENERATOR = np.random.default_rng(3)
REFERENCE = GENERATOR.standard_normal((5, 4, 3)).astype(np.float32)
NOISE = GENERATOR.standard_normal((5, 4, 3)).astype(np.float32)


def near(error: float) -> np.ndarray:
    return REFERENCE + error * np.random.default_rng(1).standard_normal(REFERENCE.shape).astype(np.float32)


def test_equal_actions_are_at_no_distance() -> None:
    found = distances(REFERENCE, REFERENCE, NOISE)
    assert found.relative_error == 0
    assert found.max_abs_per_dim == (0.0, 0.0, 0.0)
    assert found.cosine_global == pytest.approx(1)
    assert found.cosine_flow == pytest.approx(1)


def test_one_wrong_observation_is_the_worst_one() -> None:
    actions = REFERENCE.copy()
    actions[3] *= -1
    found = distances(actions, REFERENCE, NOISE)
    assert found.worst == 3
    assert found.cosine_worst == pytest.approx(-1)
    assert found.cosine_global > found.cosine_worst


def test_the_largest_difference_is_told_for_each_dimension() -> None:
    actions = REFERENCE.copy()
    actions[2, 1, 0] += 0.5
    actions[4, 3, 2] -= 0.25
    assert distances(actions, REFERENCE, NOISE).max_abs_per_dim == pytest.approx((0.5, 0.0, 0.25), abs=1e-6)


def test_noise_that_both_share_does_not_hide_a_wrong_flow() -> None:
    noise = 100 * NOISE
    found = distances(noise + near(0.5), noise + REFERENCE, noise)
    assert found.cosine_global > 0.9999
    assert found.cosine_flow < 0.99


def test_a_value_that_is_not_finite_is_the_worst_there_is() -> None:
    actions = REFERENCE.copy()
    actions[1, 0, 0] = np.nan
    found = distances(actions, REFERENCE, NOISE)
    assert (found.cosine_global, found.cosine_worst, found.worst) == (-1.0, -1.0, 1)
    assert found.relative_error == float("inf")
    assert len(failures({10: found}, {10: distances(REFERENCE, REFERENCE, NOISE)})) == 3


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match="cannot compare"):
        distances(REFERENCE[:, :2], REFERENCE, NOISE)


def test_the_cosine_of_nothing_is_zero() -> None:
    assert cosine(np.zeros(3), np.ones(3)) == 0


def test_all_is_well_at_the_bar() -> None:
    found = distances(near(1e-3), REFERENCE, NOISE)
    assert failures({1: found, 10: found}, {1: found, 10: found}) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cosine_global": 0.99989}, "global cosine 0.999890 is below 0.9999"),
        ({"cosine_worst": COSINE_WORST - 1e-6, "worst": 7}, "of observation 7 is below"),
        ({"relative_error": 0.1}, "is above that of the official bfloat16 model"),
        ({"relative_error": float("nan")}, "is above that of the official"),
        ({"cosine_global": float("nan")}, "global cosine nan"),
    ],
)
def test_each_way_to_be_below_the_bar_is_told(changes: dict[str, float], said: str) -> None:
    good: Distances = distances(near(1e-3), REFERENCE, NOISE)
    found = failures({10: replace(good, **changes)}, {10: good})  # type: ignore[arg-type]
    assert len(found) == 1
    assert found[0].startswith("10 steps: ")
    assert said in found[0]


def test_layer_errors_weigh_observations_by_their_size() -> None:
    reference = torch.randn(2, 2, 6, 4, generator=torch.Generator().manual_seed(0))
    errors = LayerErrors()
    errors.add(reference.clone(), reference)
    shifted = reference.clone()
    shifted[1, 0] *= 1.1
    errors.add(shifted, reference)
    first, second = errors.to_list()
    assert first == {"key": 0.0, "value": 0.0}
    assert second["key"] == pytest.approx(0.1 / 2**0.5, rel=1e-3)
    assert second["value"] == 0.0


def test_layer_errors_refuse_other_shapes() -> None:
    with pytest.raises(ValueError, match="cannot compare"):
        LayerErrors().add(torch.zeros(2, 2, 6, 4), torch.zeros(2, 2, 5, 4))
