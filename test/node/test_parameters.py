"""The parameter table: types, ranges, families, and what is said about the unknown."""

from __future__ import annotations

import math
from typing import Any

import pytest

from flashrt_ros.node.parameters import (
    FAMILIES,
    PARAMETERS,
    JointLimits,
    ParameterError,
    ViewSettings,
    find,
    settings_from,
    unknown_text,
)

NODE = "/robot/policy"
MINIMAL: dict[str, object] = {"policy.name": "pi05"}


def test_every_row_is_complete_and_its_default_is_allowed() -> None:
    rows = (*PARAMETERS, *FAMILIES)
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        assert row.description.endswith("."), row.name
        assert row.checked(row.name, row.default) == row.default


def test_defaults_and_policy_settings_reach_the_settings() -> None:
    settings = settings_from({**MINIMAL, "policy.preset": "pi05_tiny", "policy.chunk": 8, "use_sim_time": True}, NODE)
    assert settings.policy == "pi05"
    assert settings.policy_settings == {"preset": "pi05_tiny", "chunk": 8}
    assert settings.rate_hz == 5.0
    assert settings.max_step == math.inf


def test_an_integer_is_accepted_for_a_double() -> None:
    rate = settings_from({**MINIMAL, "rate_hz": 10}, NODE).rate_hz
    assert rate == 10.0
    assert isinstance(rate, float)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("rate_hz", "fast", "parameter 'rate_hz' is 'fast' (string), expected a double"),
        ("rate_hz", True, "parameter 'rate_hz' is True (boolean), expected a double"),
        ("rate_hz", 0, "parameter 'rate_hz' is 0, expected 0.01 to 1000"),
        ("rate_hz", math.nan, "parameter 'rate_hz' is nan, expected 0.01 to 1000"),
        ("warmup", 2.0, "parameter 'warmup' is 2.0 (double), expected an integer"),
        ("max_step", -1.0, "parameter 'max_step' is -1, expected at least 0"),
        ("stall_policy", "panic", "parameter 'stall_policy' is 'panic', expected one of none, hold, stop"),
        ("action_joints", "a", "parameter 'action_joints' is 'a' (string), expected a string array"),
        ("views.front.compressed", "yes", "parameter 'views.front.compressed' is 'yes' (string), expected a boolean"),
        ("limits.a.lower", "low", "parameter 'limits.a.lower' is 'low' (string), expected a double"),
    ],
)
def test_wrong_values_are_refused_with_name_value_and_expectation(name: str, value: Any, words: str) -> None:
    with pytest.raises(ParameterError) as error:
        settings_from({**MINIMAL, name: value}, NODE)
    assert str(error.value) == words


def test_without_a_policy_the_error_names_the_node_that_the_file_should_address() -> None:
    with pytest.raises(ParameterError, match=r"no policy and no checkpoint.*'/robot/policy:' or '/\*\*:'"):
        settings_from({}, NODE)


def test_views_have_default_topics_and_may_be_compressed() -> None:
    given = {"views.wrist.topic": "/cam1/image", "views.front.compressed": True, "views.top.left.topic": "t"}
    settings = settings_from({**MINIMAL, **given}, NODE)
    assert settings.view("wrist") == ViewSettings("/cam1/image", compressed=False)
    assert settings.view("front") == ViewSettings("front/image_raw/compressed", compressed=True)
    assert settings.view("back") == ViewSettings("back/image_raw", compressed=False)
    assert settings.view("top.left").topic == "t"


def test_limits_are_collected_by_joint() -> None:
    given = {"limits.a.lower": -1, "limits.a.upper": 2.0, "limits.b.max_step": 0.1}
    limits = settings_from({**MINIMAL, **given}, NODE).limits
    assert limits == {"a": JointLimits(lower=-1.0, upper=2.0), "b": JointLimits(max_step=0.1)}


def test_empty_lists_of_strings_come_in_three_shapes_and_mean_the_same() -> None:
    for empty in (None, [], [""]):
        assert settings_from({**MINIMAL, "action_joints": empty}, NODE).action_joints == ()


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("rate", "rate_hz"),
        ("max_agee", "max_age"),
        ("checkpoint", "policy.checkpoint"),
        ("view.front.topic", "views.<name>.topic"),
        ("limits.a.uper", "limits.<name>.upper"),
    ],
)
def test_unknown_names_come_with_the_nearest(name: str, nearest: str) -> None:
    assert find(name) is None
    assert unknown_text(name) == f"unknown parameter '{name}'; the nearest is '{nearest}'"


def test_a_name_that_resembles_nothing_comes_with_all_that_are_known() -> None:
    assert "known: autostart, policy.name" in unknown_text("zzz")
