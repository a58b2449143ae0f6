"""The whole policy through its session: plans, reuse, prompts, capsules, determinism."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from flashrt_ros.contract import Contract, DType, Identity, Rate, Role
from flashrt_ros.policies import Policy, PolicyRunner, PromptError, build_policy
from flashrt_ros.policies.pi05 import Pi05Config
from flashrt_ros.policies.pi05.plan import build_contract
from flashrt_ros.policies.pi05.policy import with_overlap
from flashrt_ros.policies.pi05.presets import JOINT_RANGES
from flashrt_ros.policies.pixels import PixelOrder
from test.ops.forbid import CaptureSafe
from test.policies.pi05.tiny import INSTRUCTION, STATE, look, small_policy, started

LONGER = "pick up the red cup and put it down next to the plate, then stop and hold it"


def test_it_is_found_by_name() -> None:
    policy: Policy = build_policy("pi05", {"preset": "pi05_tiny"})
    assert policy.name == "pi05"
    assert policy.views == ("front", "wrist")
    assert len(policy.action_names) == 8


# -- plans -------------------------------------------------------------------------------------------------------------


def test_full_and_split_plans_give_equal_bits() -> None:
    split, full = started(plan="split"), started(plan="full")
    for seed in range(3):
        for runner in (split, full):
            look(runner, seed)
        assert np.array_equal(split.decide().actions, full.decide().actions)
    assert np.array_equal(split.session.read("key_value"), full.session.read("key_value"))


def test_plans_differ_in_their_stages() -> None:
    assert [stage.name for stage in small_policy().contract.order] == ["checkpoint", "prompt", "context", "action"]
    assert [stage.name for stage in small_policy(plan="full").contract.order] == ["checkpoint", "prompt", "full"]


def test_only_what_changed_is_replayed() -> None:
    runner = started()
    assert runner.decide().replayed[-3:] == ("prompt", "context", "action")
    assert runner.decide().replayed == ("action",)  # fresh noise alone
    look(runner, seed=1)
    assert runner.decide().replayed == ("context", "action")
    runner.set_instruction("open the drawer")
    assert runner.decide().replayed == ("prompt", "context", "action")
    runner.set_state(STATE + np.float32(1e-6))  # too little for another bin
    assert runner.decide().replayed == ("action",)
    runner.set_state(STATE + np.float32(0.1))
    assert runner.decide().replayed == ("prompt", "context", "action")
    assert runner.session.counts["checkpoint"] == 1


def test_reuse_gives_the_bits_of_a_fresh_session() -> None:
    reused, fresh = started(), started()
    reused.set_instruction("open the drawer")
    reused.decide()
    reused.set_instruction(INSTRUCTION)
    look(reused, seed=2)
    look(fresh, seed=2)
    for runner in (reused, fresh):
        runner.session.seed(7)
    assert np.array_equal(reused.decide().actions, fresh.decide().actions)


# -- determinism and sense ---------------------------------------------------------------------------------------------


def test_an_equal_seed_gives_equal_bits_and_another_seed_others() -> None:
    chunks = []
    for seed in (5, 5, 6):
        runner = started()
        runner.session.seed(seed)
        chunks.append(runner.decide().actions)
    assert np.array_equal(chunks[0], chunks[1])
    assert not np.array_equal(chunks[0], chunks[2])


def test_image_instruction_and_position_all_matter() -> None:
    runner = started()

    def rows() -> np.ndarray:
        runner.session.seed(1)
        return runner.decide().actions

    first = rows()
    look(runner, seed=1)
    second = rows()
    runner.set_instruction("open the drawer")
    third = rows()
    assert np.abs(first - second).max() > 1e-3
    assert np.abs(second - third).max() > 1e-3
    assert np.abs(np.diff(third, axis=0)).max() > 1e-4


def test_views_are_told_apart() -> None:
    runner, swapped = started(), started()
    look(runner)
    front, wrist = (np.full((40, 40, 3), value, np.uint8) for value in (10, 240))
    for target, images in ((runner, (front, wrist)), (swapped, (wrist, front))):
        for view, image in zip(target.policy.views, images, strict=True):
            target.set_image(view, image, PixelOrder.RGB)
    assert not np.array_equal(runner.decide().actions, swapped.decide().actions)


def test_the_tiny_preset_moves_smoothly_within_the_joint_limits() -> None:
    runner = PolicyRunner.start(build_policy("pi05", {"preset": "pi05_tiny", "max_pixels": 64 * 64}))
    limits = np.array([JOINT_RANGES[name] for name in runner.policy.action_names])
    span = limits[:, 1] - limits[:, 0]
    runner.set_instruction(INSTRUCTION)
    for seed in range(4):
        look(runner, seed)
        actions = runner.decide().actions
        assert actions.shape == (16, 8)
        assert actions.dtype == np.float32
        assert (actions > limits[:, 0]).all()
        assert (actions < limits[:, 1]).all()
        assert np.abs(actions[0, :7] - STATE[:7]).max() < 0.3
        assert (np.abs(np.diff(actions, axis=0)).max(axis=0) < 0.25 * span).all()


def test_unknown_joints_work_with_the_tiny_preset() -> None:
    names = ["left_wheel", "right_wheel"]
    changes: dict[str, Any] = {"state_names": names, "action_names": names, "absolute_actions": []}
    runner = PolicyRunner.start(small_policy(**changes))
    for view in runner.policy.views:
        runner.set_image(view, np.zeros((8, 8, 3), np.uint8), PixelOrder.RGB)
    runner.set_state(np.zeros(2, np.float32))
    runner.set_instruction("drive")
    assert runner.decide().actions.shape == (16, 2)


# -- prompts -----------------------------------------------------------------------------------------------------------


def test_a_bucket_longer_than_needed_changes_nothing_but_rounding() -> None:
    short, long = started(prompt_buckets=[64, 128]), started(prompt_buckets=[128])
    first, second = short.decide(), long.decide()
    assert short.session.variant == "prompt_64"
    assert long.session.variant == "prompt_128"
    assert first.prompt == second.prompt
    np.testing.assert_allclose(first.actions, second.actions, atol=1e-5)


def test_a_longer_instruction_selects_the_longer_bucket_and_back() -> None:
    runner = started(prompt_buckets=[52, 128])
    runner.session.seed(1)
    first = runner.decide().actions
    assert runner.session.variant == "prompt_52"
    runner.set_instruction(LONGER)
    runner.decide()
    assert runner.session.variant == "prompt_128"
    runner.set_instruction(INSTRUCTION)
    runner.session.seed(1)
    assert np.array_equal(runner.decide().actions, first)


def test_extents_say_how_many_rows_are_live() -> None:
    runner = started()
    runner.decide()
    tokens = int((runner.session.read("tokens") != -1).sum())
    image_rows = 2 * (28 // 14) ** 2
    assert runner.session.extents == {"prompt_rows": tokens, "prefix_rows": image_rows + tokens}
    assert runner.session.read("prefix_rows").tolist() == [image_rows + tokens]


def test_a_prompt_that_is_too_long_is_refused_and_the_old_one_kept() -> None:
    runner = started(prompt_buckets=[64])
    runner.decide()
    before = runner.session.versions
    runner.set_instruction(LONGER + LONGER)
    with pytest.raises(PromptError, match=r"the prompt has \d+ tokens, the longest bucket holds 64"):
        runner.decide()
    assert runner.session.versions == before
    runner.set_instruction(INSTRUCTION)
    assert runner.decide().replayed == ("action",)


def test_nothing_is_captured_after_configure() -> None:
    runner = started()
    runner.decide()
    addresses = {name: tensor.data_ptr() for name, tensor in runner.session.arena.items()}
    runner.set_instruction(LONGER)
    look(runner, seed=3)
    runner.decide()
    assert {name: tensor.data_ptr() for name, tensor in runner.session.arena.items()} == addresses


# -- capsules ----------------------------------------------------------------------------------------------------------


def test_a_restored_capsule_brings_its_prompt_back() -> None:
    runner = started()
    runner.session.seed(4)
    runner.decide()
    runner.session.snapshot("red_cup")
    expected = runner.decide().actions
    runner.set_instruction(LONGER)
    runner.decide()
    runner.session.restore("red_cup")
    decision = runner.decide()
    assert decision.replayed == ("action",)
    assert np.array_equal(decision.actions, expected)


def test_after_a_restore_another_prompt_is_written_again() -> None:
    runner = started()
    runner.decide()
    runner.session.snapshot("red_cup")
    runner.set_instruction(LONGER)
    runner.decide()
    runner.session.restore("red_cup")
    runner.set_instruction(LONGER)
    assert "prompt" in runner.decide().replayed


def test_tokens_that_somebody_else_wrote_are_replaced_by_the_prompt() -> None:
    runner = started()
    runner.decide()
    written = runner.session.read("tokens")
    runner.session.fill("tokens", np.full_like(written, 7))
    assert "prompt" in runner.decide().replayed
    np.testing.assert_array_equal(runner.session.read("tokens"), written)


def test_an_equal_prompt_that_somebody_else_wrote_is_not_written_again() -> None:
    runner = started()
    runner.decide()
    runner.session.fill("tokens", runner.session.read("tokens"))
    version = runner.session.versions["tokens"]
    for _ in range(2):
        runner.decide()
        assert runner.session.versions["tokens"] == version


def test_sessions_of_one_policy_keep_their_prompts_apart() -> None:
    policy = small_policy()
    runners = [PolicyRunner.start(policy, seed=1) for _ in range(2)]
    for runner, instruction in zip(runners, (INSTRUCTION, LONGER), strict=True):
        look(runner)
        runner.set_instruction(instruction)
    alone = [runner.decide().actions for runner in runners]
    for _ in range(2):
        for runner, actions in zip(runners, alone, strict=True):
            runner.session.seed(1)
            assert np.array_equal(runner.decide().actions, actions)


# -- contract ----------------------------------------------------------------------------------------------------------


def true_contract(**changes: Any) -> Contract:
    names: dict[str, Any] = {"views": ("front", "wrist"), "state_names": ("a",), "action_names": ("a",)}
    config = Pi05Config(**{**names, "chunk": 10, "prompt_buckets": (200,), **changes})
    return build_contract(config, Identity(policy="pi05", weights="0" * 64))


def test_buffers_of_the_true_size_have_the_published_bytes() -> None:
    contract = true_contract()
    sizes = {name: contract.buffer(name).nbytes for name in ("prompt_embedding", "prefix_residual", "prefix_gate_up")}
    assert sizes == {"prompt_embedding": 819_200, "prefix_residual": 2_916_352, "prefix_gate_up": 46_661_632}
    assert contract.buffer("prefix_hidden").nbytes == 23_330_816
    assert contract.buffer("noise").shape == (10, 32)
    assert contract.buffer("chunk_rope").nbytes == 5_120
    assert contract.buffer("key_value").nbytes == 2 * 18 * 712 * 256 * 2
    assert contract.buffer("modulation").shape == (10, 37, 3, 1024)


def test_capsules_save_live_rows_of_every_layer() -> None:
    contract = true_contract()
    region = next(region for region in contract.regions if region.buffer == "key_value")
    assert region.blocks == 2 * 18
    assert region.live == "prefix_rows"
    assert region.row_bytes(contract.extent("prefix_rows")) == 256 * 2
    saved = {region.buffer for region in contract.regions}
    assert saved == {"key_value", "prompt_embedding", "chunk_rope", "prefix_rows", "tokens", "noise", "actions"}


def test_roles_and_rates() -> None:
    contract = true_contract()
    assert {stage.name: stage.rate for stage in contract.stages} == {
        "checkpoint": Rate.CHECKPOINT,
        "prompt": Rate.PROMPT,
        "context": Rate.OBSERVATION,
        "action": Rate.STEP,
    }
    assert contract.buffer("image.front").dtype is DType.UINT8
    assert [b.name for b in contract.buffers if b.role is Role.STATE] == ["key_value"]


def test_a_contract_survives_json() -> None:
    contract = small_policy().contract
    assert Contract.from_json(contract.to_json()).fingerprint == contract.fingerprint


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 4},
        {"chunk": 8},
        {"views": ["front"]},
        {"prompt_buckets": [64]},
        {"plan": "full"},
        {"dtype": "bfloat16"},
        {"absolute_actions": []},
        {"action_names": ["panda_joint2", "panda_joint1"], "absolute_actions": []},
        {"rope_theta": 5000.0},
        {"eps": 1e-5},
    ],
    ids=str,
)
def test_whatever_changes_the_meaning_of_bytes_changes_the_fingerprint(changes: dict[str, Any]) -> None:
    assert small_policy(**changes).contract.fingerprint != small_policy().contract.fingerprint


def test_every_stage_can_be_captured() -> None:
    policy = small_policy(plan="split")
    session = started().session
    for stage in policy.contract.order:
        for variant in policy.contract.variants:
            with CaptureSafe(), torch.inference_mode():
                policy.bodies[stage.name](session.arena, variant)


def test_sixteen_bit_stays_near_thirty_two() -> None:
    exact, rounded = started(), started(dtype="bfloat16")
    first, second = exact.decide().actions, rounded.decide().actions
    assert 0 < np.abs(first - second).max() < 0.05
    assert np.isfinite(second).all()


# -- the same weights again --------------------------------------------------------------------------------------------


def test_overlap_is_switched_without_another_copy_of_the_weights() -> None:
    policy = small_policy()
    other = with_overlap(policy, not policy.config.overlap, torch.device("cpu"))
    assert other.config.overlap != policy.config.overlap
    assert other.weights is policy.weights
    assert other.contract.fingerprint == policy.contract.fingerprint
