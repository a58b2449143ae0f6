from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrt_ros.policies import CheckpointError, PolicyError, PromptError, SettingsError
from flashrt_ros.policies.pi05.checkpoint import Normalisers
from flashrt_ros.policies.pi05.config import Pi05Config
from flashrt_ros.policies.pi05.normalisation import Normaliser, normaliser_from, range_normaliser
from flashrt_ros.policies.pi05.presets import SEEDED_PRESETS
from flashrt_ros.policies.pi05.processor import Pi05Processor
from flashrt_ros.policies.pi05.prompt import discretise, prompt_text
from flashrt_ros.policies.pi05.tokenizer import Tokenizer

TOKENIZER = Tokenizer(SEEDED_PRESETS["pi05_tiny"].tokenizer)
STATE = np.array([1.0, 2.0, 3.0], np.float32)


def config(**changes: Any) -> Pi05Config:
    names: dict[str, Any] = {"views": ("v",), "state_names": ("a", "b", "c"), "action_names": ("a", "b", "c")}
    return Pi05Config(**{**names, "prompt_buckets": (32, 64), **changes})


def processor(**changes: Any) -> Pi05Processor:
    ranges = range_normaliser(np.zeros(3), np.array([2.0, 4.0, 8.0]))
    return Pi05Processor(config(**changes), TOKENIZER, Normalisers(ranges, ranges))


def rows(*values: float) -> np.ndarray:
    padded = np.full((2, 32), 99.0, np.float32)
    padded[:, : len(values)] = values
    return padded


# -- text --------------------------------------------------------------------------------------------------------------


def test_the_text_holds_task_and_state_bins() -> None:
    assert processor().text("  pick_up\nthe cup ", STATE) == "Task: pick up the cup, State: 128 128 96;\nAction: "


@pytest.mark.parametrize(
    ("value", "number"), [(-1.5, -1), (-1.0, 0), (-0.9921875, 1), (0.0, 128), (0.999, 255), (1.0, 255), (7.0, 255)]
)
def test_bins_reach_from_minus_one_below_the_range_to_255_at_and_above_its_end(value: float, number: int) -> None:
    assert discretise(np.array([value], np.float32)).tolist() == [number]


@pytest.mark.parametrize("instruction", ["", "  ", "\n", "_"])
def test_an_empty_instruction_is_refused(instruction: str) -> None:
    with pytest.raises(PromptError, match="the instruction is empty"):
        processor().text(instruction, STATE)


def test_a_missing_state_is_refused_only_where_the_prompt_holds_it() -> None:
    with pytest.raises(PromptError, match="no state has arrived yet"):
        processor().text("go", None)
    assert processor(state_in_prompt=False).text("go", None) == "go\n"


def test_a_state_of_another_width_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"state has shape \[2\], expected \[3\]"):
        processor().text("go", STATE[:2])


def test_a_state_that_is_not_finite_is_refused_by_name() -> None:
    with pytest.raises(PolicyError, match="state of 'b' is not finite"):
        processor().text("go", np.array([0, np.nan, np.inf], np.float32))


def test_half_a_character_is_refused() -> None:
    with pytest.raises(PromptError, match="half a character"):
        processor().tokens("pick up \ud83d")


def test_text_without_state() -> None:
    assert prompt_text("a_b", None) == "a b\n"


# -- tokens ------------------------------------------------------------------------------------------------------------


def test_tokens_begin_with_bos_and_are_padded_with_minus_one() -> None:
    tokens = processor().tokens("pick up")
    assert tokens.dtype == np.int32
    assert tokens.shape == (64,)
    assert tokens[0] == 2
    count = int((tokens != -1).sum())
    assert (tokens[count:] == -1).all()
    assert (tokens[:count] >= 0).all()


def test_the_smallest_bucket_that_holds_the_tokens_is_chosen() -> None:
    made = processor()
    assert made.bucket(np.array([2] * 32 + [-1] * 32)) == 32
    assert made.bucket(np.array([2] * 33 + [-1] * 31)) == 64


def test_a_prompt_beyond_the_longest_bucket_is_refused_with_both_counts() -> None:
    made = processor()
    longest = "9" * 63  # digits are tokens of their own
    assert (made.tokens(longest) != -1).all()
    with pytest.raises(PromptError, match="the prompt has 65 tokens, the longest bucket holds 64; shorten"):
        made.tokens(longest + "9")


def test_a_refused_prompt_leaves_the_one_before_in_force() -> None:
    made = processor()
    before = made.tokens("pick up").copy()
    with pytest.raises(PromptError):
        made.tokens("9" * 100)
    assert np.array_equal(made.tokens("pick up"), before)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused() -> None:
    with pytest.raises(SettingsError, match="the tokenizer has 896 tokens, but the model's vocabulary is 895"):
        processor(vocabulary=895)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot read tokenizer '.*none.model': No such file"):
        Tokenizer(tmp_path / "none.model")


# -- actions -----------------------------------------------------------------------------------------------------------


def test_actions_are_unnormalised_and_cut_to_their_names() -> None:
    np.testing.assert_allclose(processor().actions(rows(-1, 0, 1), None), [[0, 2, 8]] * 2)


def test_columns_follow_the_names() -> None:
    made = processor(action_names=("c", "a"), action_columns=(2, 0))
    np.testing.assert_allclose(made.actions(rows(-1, 0, 1), None), [[8, 0]] * 2)


def test_relative_actions_add_the_state_of_the_same_name() -> None:
    made = processor(state_names=("c", "a", "b"), relative_actions=True, absolute_actions=("b",))
    # state: c = 1, a = 2, b = 3
    np.testing.assert_allclose(made.actions(rows(-1, 0, 1), STATE), [[0 + 2, 2, 8 + 1]] * 2)


def test_relative_actions_in_another_order_of_names() -> None:
    made = processor(action_names=("c", "b", "a"), action_columns=(2, 1, 0), relative_actions=True)
    np.testing.assert_allclose(made.actions(rows(-1, 0, 1), STATE), [[8 + 3, 2 + 2, 0 + 1]] * 2)


def test_columns_side_by_side_give_the_bits_of_the_same_ones_scattered() -> None:
    values = rows(0.123, -0.456, 0.789)
    straight = processor(action_names=("b", "c"), action_columns=(1, 2)).actions(values, None)
    turned = processor(action_names=("c", "b"), action_columns=(2, 1)).actions(values, None)
    assert straight.tobytes() == turned[:, ::-1].tobytes()
    ranges = range_normaliser(np.zeros(3), np.array([2.0, 4.0, 8.0]))
    assert straight.tobytes() == ranges.unnormalise(values[:, :3])[:, [1, 2]].tobytes()


def test_absolute_actions_among_relative_ones_keep_every_bit() -> None:
    span = np.array([2.0, 4.0, 8.0])
    made = Pi05Processor(
        config(relative_actions=True, absolute_actions=("a", "c")),
        TOKENIZER,
        Normalisers(range_normaliser(np.zeros(3), span), normaliser_from({}, "IDENTITY", 3, eps=0, what="action")),
    )
    actions = made.actions(rows(-0.0, -0.0, 0.0), STATE)
    assert np.signbit(actions).tolist() == [[True, False, False]] * 2
    assert actions[0, 1] == 2


def test_each_state_is_added_and_checked_though_the_one_before_is_remembered() -> None:
    made = processor(relative_actions=True)
    for state in (STATE, STATE + 1, STATE):
        np.testing.assert_array_equal(made.actions(rows(-1, -1, -1), state), [state] * 2)
    with pytest.raises(PolicyError, match="state has shape"):
        made.actions(rows(0, 0, 0), STATE[None])
    with pytest.raises(PolicyError, match="not finite"):
        made.actions(rows(0, 0, 0), np.array([0, np.nan, 0], np.float32))


def test_relative_actions_need_a_state() -> None:
    with pytest.raises(PolicyError, match="actions are relative to the robot's state"):
        processor(relative_actions=True).actions(rows(0, 0, 0), None)


def test_the_models_rows_are_left_alone() -> None:
    given_rows = rows(0, 0, 0)
    before = given_rows.copy()
    processor(relative_actions=True).actions(given_rows, STATE)
    assert np.array_equal(given_rows, before)


# -- normalisation -----------------------------------------------------------------------------------------------------

STATISTICS = {
    "q01": np.array([-2.0, 0.0]), "q99": np.array([2.0, 0.0]), "q10": np.array([-1.0, -1.0]),
    "q90": np.array([1.0, 3.0]), "min": np.array([-4.0, 0.0]), "max": np.array([4.0, 8.0]),
    "mean": np.array([1.0, 2.0]), "std": np.array([2.0, 4.0]),
}  # fmt: skip


def made(mode: str) -> Normaliser:
    return normaliser_from(STATISTICS, mode, 2, eps=1e-8, what="action")


@pytest.mark.parametrize(
    ("mode", "normalised"),
    [("QUANTILE10", [1.0, 0.0]), ("MIN_MAX", [0.25, -0.75]), ("MEAN_STD", [0.0, -0.25]), ("IDENTITY", [1.0, 1.0])],
)
def test_each_mode_and_back(mode: str, normalised: list[float]) -> None:
    normaliser, values = made(mode), np.array([1.0, 1.0], np.float32)
    np.testing.assert_allclose(normaliser.normalise(values), normalised, atol=1e-6)
    np.testing.assert_allclose(normaliser.unnormalise(normaliser.normalise(values)), values, atol=1e-6)


def test_a_joint_that_never_moved_maps_to_minus_one() -> None:
    assert made("QUANTILES").normalise(np.array([0.0, 0.0])).tolist() == [0.0, -1.0]


@given(st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=2))
def test_range_normalisation_is_undone(values: list[float]) -> None:
    normaliser = made("MIN_MAX")
    array = np.array(values, np.float32)
    np.testing.assert_allclose(normaliser.unnormalise(normaliser.normalise(array)), array, atol=1e-4)


@pytest.mark.parametrize(
    ("statistics", "mode", "message"),
    [
        (STATISTICS, "WHITENED", "normalisation of 'action' is 'WHITENED', expected one of QUANTILES"),
        ({}, "QUANTILES", "needs the statistic 'q01', the checkpoint has: none"),
        ({**STATISTICS, "q01": np.zeros(3)}, "QUANTILES", r"'action.q01' has shape \[3\], expected \[2\]"),
        ({**STATISTICS, "q99": np.array([1, np.inf])}, "QUANTILES", "'action.q99' holds a value that is not finite"),
    ],
)
def test_bad_statistics_are_named(statistics: dict[str, np.ndarray], mode: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        normaliser_from(statistics, mode, 2, eps=1e-8, what="action")


def test_the_digest_sees_every_part() -> None:
    low, high = np.zeros(3), np.ones(3)
    variants = [
        range_normaliser(low, high),
        range_normaliser(low, high * 2),
        range_normaliser(low - 1, high - 1),
        Normaliser("standard", low.astype(np.float32), high.astype(np.float32)),
        Normaliser("standard", low.astype(np.float32), high.astype(np.float32), eps=1e-8),
    ]
    assert len({variant.digest() for variant in variants}) == len(variants)


def test_a_prompt_is_written_anew_exactly_when_instruction_or_state_change() -> None:
    made = processor()
    moved = STATE + np.float32(0.3)
    texts = [made.text(task, state) for task in ("a", "b") for state in (STATE, moved)]
    assert len(set(texts)) == 4
    assert [made.text(task, state) for task in ("a", "b") for state in (STATE, moved)] == texts
    prompt = made.prompt(texts[0])
    assert made.prompt(texts[0]) is prompt
    assert prompt.count == int((prompt.tokens >= 0).sum()) <= prompt.bucket
    assert made.prompt(texts[1]).text == texts[1]


def test_a_refused_instruction_does_not_hide_behind_the_one_before() -> None:
    made = processor()
    made.text("go", STATE)
    for _ in range(2):
        with pytest.raises(PromptError, match="empty"):
            made.text(" ", STATE)


def test_a_prompt_is_known_by_the_content_that_it_was_found_in() -> None:
    made = processor()
    one, other = made.prompt("Task: one"), made.prompt("Task: other")
    assert not made.is_content(one, 5)
    made.note_content(one, 5)
    assert made.is_content(one, 5)
    assert not made.is_content(one, 6)
    assert not made.is_content(other, 5)
    assert one.variant == "prompt_32"
