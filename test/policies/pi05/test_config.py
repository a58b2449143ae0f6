from __future__ import annotations

from typing import Any

import pytest

from flashrt_ros.policies import SettingsError
from flashrt_ros.policies.pi05 import Pi05Config
from flashrt_ros.policies.pi05.settings import resolve

NAMES: dict[str, Any] = {"views": ("top",), "state_names": ("a", "b"), "action_names": ("a", "b")}


def config(**changes: Any) -> Pi05Config:
    return Pi05Config(**{**NAMES, **changes})


def test_the_defaults_are_the_true_size() -> None:
    true = config(views=("top", "left"), chunk=10)
    assert (true.patches, true.patch_values, true.image_rows, true.prefix_rows) == (256, 588, 512, 712)
    assert (true.query_width, true.key_width, true.modulations) == (2048, 256, 37)
    assert true.action_columns == (0, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, r"setting 'steps' is 0, expected a value above 0"),
        ({"chunk": -1}, r"'chunk' is -1"),
        ({"layers": 1}, r"'layers' is 1, expected at least 2"),
        ({"plan": "both"}, r"'plan' is 'both', expected one of split, full"),
        ({"dtype": "float64"}, r"'dtype' is 'float64', expected one of float32, bfloat16"),
        ({"image_size": 225}, r"'image_size' is 225, expected a multiple of patch_size \(14\)"),
        ({"vision_heads": 7}, r"'vision_width' is 1152, expected a multiple of vision_heads \(7\)"),
        ({"query_heads": 3, "key_heads": 2}, r"'query_heads' is 3, expected a multiple of key_heads"),
        ({"head_dim": 5}, r"'head_dim' is 5, expected an even number"),
        ({"expert_width": 5}, r"'expert_width' is 5, expected an even number"),
        ({"prompt_buckets": ()}, r"'prompt_buckets' is \[\], expected one or more"),
        ({"prompt_buckets": (96, 48)}, r"'prompt_buckets' is \[96, 48\], expected .* ascending"),
        ({"prompt_buckets": (0, 48)}, r"'prompt_buckets' is \[0, 48\]"),
        ({"prompt_buckets": 48}, r"'prompt_buckets' is 48, expected a list of int"),
        ({"prompt_buckets": (48, 9.5)}, r"'prompt_buckets\[1\]' is 9.5 \(float\), expected int"),
        ({"views": "top"}, r"'views' is 'top', expected a list of str"),
        ({"views": ()}, r"'views' is empty; name them"),
        ({"views": ("top", "top")}, r"each name once, but 'top' is repeated"),
        ({"views": ("Top View",)}, r"'Top View' must be of a-z"),
        ({"action_names": ("a", "")}, r"'action_names' is .* expected no empty name"),
        ({"state_names": ()}, r"'state_names' is empty"),
        ({"state_in_prompt": 1}, r"'state_in_prompt' is 1 \(int\), expected bool"),
        ({"chunk": True}, r"'chunk' is True \(bool\), expected int"),
        ({"chunk": "10"}, r"'chunk' is '10' \(str\), expected int"),
        ({"action_columns": (0, 0)}, r"'action_columns' is \[0, 0\], expected 2 different columns"),
        ({"action_columns": (0, 32)}, r"2 action_names use columns \[0, 32\] of a row of 32"),
        ({"padded_width": 1}, r"2 action_names use columns \[0, 1\] of a row of 1"),
        ({"absolute_actions": ("c",)}, r"'absolute_actions' is 'c', expected one of a, b"),
        ({"relative_actions": True, "state_names": ("a", "x")}, r"action 'b' is relative, but state_names has no 'b'"),
    ],
)
def test_a_bad_value_names_field_value_and_remedy(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        config(**changes)


def test_a_state_is_needed_only_by_prompt_or_relative_actions() -> None:
    assert config(state_names=(), state_in_prompt=False).state_names == ()
    with pytest.raises(SettingsError, match="'state_names' is empty"):
        config(state_names=(), state_in_prompt=False, relative_actions=True)


def test_a_relative_action_without_a_state_may_be_listed_as_absolute() -> None:
    changes = {"relative_actions": True, "state_names": ("a",), "absolute_actions": ("b",)}
    assert config(**changes).absolute_actions == ("b",)


def test_lists_become_tuples_and_whole_numbers_floats() -> None:
    made = config(views=["top"], action_dt=1)
    assert made.views == ("top",)
    assert type(made.action_dt) is float


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chunck": 10}, r"policy 'pi05': unknown setting 'chunck'; did you mean 'chunk'\?"),
        ({"xyz": 10}, r"unknown setting 'xyz'; known: "),
        ({"preset": "pi05_tyny"}, r"unknown preset 'pi05_tyny'; did you mean 'pi05_tiny'\?"),
        ({"preset": "pi05"}, r"preset 'pi05' has no weights of its own; set 'checkpoint'"),
        ({"preset": 5}, r"setting 'preset' is 5 \(int\), expected str"),
    ],
)
def test_a_typing_error_in_the_settings_is_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        resolve(settings)


@pytest.mark.parametrize("settings", [{}, {"chunk": 10}, {"preset": "pi05"}])
def test_seeded_weights_run_only_where_their_preset_is_named(settings: dict[str, object]) -> None:
    with pytest.raises(SettingsError, match="set 'checkpoint' .* or 'preset' to one with seeded weights: pi05_tiny"):
        resolve(settings)


def test_settings_change_a_preset() -> None:
    resolved = resolve({"preset": "pi05_tiny", "chunk": 8, "views": ["front"], "plan": "full"})
    assert (resolved.config.chunk, resolved.config.views, resolved.config.plan) == (8, ("front",), "full")
    assert resolved.config.expert_width == 128
