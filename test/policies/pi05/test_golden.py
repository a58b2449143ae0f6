"""Ours against what LeRobot 0.6.1 computed from the same checkpoint, pixels, state, instruction and noise."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flashrt_ros.engine import Session
from flashrt_ros.ops import OpTable, reference_ops
from flashrt_ros.ops.pixels import pixels_to_patches
from flashrt_ros.ops.rope import select_rows
from flashrt_ros.policies.pi05 import Pi05Policy, build
from flashrt_ros.policies.pixels import PixelOrder
from test.policies.pi05.golden import CASES, FACTS, FOLDER, VIEWS, Case, settings

BOUND = 1e-4
LAYERS: list[int] = FACTS["layers"]
VIEW_ROWS = (FACTS["sizes"]["image_size"] // FACTS["sizes"]["patch_size"]) ** 2
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: f"case{case.index}")


def distance(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Relative error in the 2-norm."""
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def decided(policy: Pi05Policy, case: Case) -> Session:
    """A session of `policy` that has decided on `case`."""
    session = Session(policy.contract, policy.bodies)
    policy.prepare(session)
    session.configure()
    formats = []
    for view in VIEWS:
        image = case[f"image.{view}"]
        with session.window(f"image.{view}", rows=image.size) as window:
            window[:] = image.reshape(-1)
        formats.append((*image.shape, PixelOrder.RGB))
    session.fill("image_format", np.array(formats, np.int32))
    policy.write_prompt(session, case.task, case["state"])
    session.fill("noise", case["noise"])
    session.act()
    return session


@cache
def official(steps: int, plan: str = "split") -> Pi05Policy:
    return build(settings(steps=steps, plan=plan))


def moved(session: Session, case: Case) -> np.ndarray:
    """How far the flow carried the noise: the part of the actions that the model decides."""
    flow: np.ndarray = session.read("actions") - case["noise"]
    return flow


@every_case
def test_the_prompt_is_the_official_one(case: Case) -> None:
    policy = official(10)
    text = policy.processor.text(case.task, case["state"])
    assert text == case.text
    tokens = policy.processor.tokens(text)
    count = int(case["mask"].sum())
    assert tokens[:count].tolist() == case["tokens"][:count].tolist()
    assert (tokens[count:] == -1).all()


@every_case
@pytest.mark.parametrize("view", VIEWS)
def test_pixels_are_prepared_as_officially(case: Case, view: str) -> None:
    image, official_image = case[f"image.{view}"], torch.from_numpy(case[f"letterboxed.{view}"])
    size, patch = FACTS["sizes"]["image_size"], FACTS["sizes"]["patch_size"]
    grid = size // patch
    rows = torch.empty(grid * grid, 3 * patch * patch)
    pixel_format = torch.tensor([*image.shape, PixelOrder.RGB], dtype=torch.int32)
    pixels_to_patches(torch.from_numpy(image).flatten(), pixel_format, patch=patch, out=rows)
    ours = rows.view(grid, grid, 3, patch, patch).permute(2, 0, 3, 1, 4).reshape(3, size, size)
    torch.testing.assert_close(ours, official_image, atol=1e-5, rtol=0)


@every_case
def test_keys_and_values_of_two_layers(case: Case) -> None:
    session = decided(official(10), case)
    cache_rows = session.read("key_value")
    rows = session.extents["prefix_rows"]
    masked_view = np.zeros(VIEW_ROWS, bool)  # the official run has a third, masked camera
    valid = np.concatenate([np.ones(len(VIEWS) * VIEW_ROWS, bool), masked_view, case["mask"].astype(bool)])
    assert rows == valid.sum()
    for layer in LAYERS:
        for part, name in enumerate(("key", "value")):
            theirs = case[f"{name}.{layer}"][valid].reshape(rows, -1)
            assert distance(cache_rows[layer, part, :rows], theirs) < BOUND, f"{name} of layer {layer}"


@every_case
@pytest.mark.parametrize("plan", ["split", "full"])
@pytest.mark.parametrize("steps", FACTS["steps"])
def test_actions(case: Case, steps: int, plan: str) -> None:
    session = decided(official(steps, plan), case)
    assert distance(session.read("actions"), case[f"actions.{steps}"]) < BOUND
    assert distance(moved(session, case), case[f"actions.{steps}"] - case["noise"]) < BOUND


@every_case
def test_commands_in_the_robots_units(case: Case) -> None:
    policy = official(10)
    ours = policy.actions(decided(policy, case), case["state"])
    assert ours.dtype == np.float32
    assert distance(ours, case["commands"]) < BOUND


# Each of these mistakes has gone unnoticed somewhere. Here each one must be seen.


def off_by_one(table: Tensor, start: Tensor, *, out: Tensor) -> None:
    select_rows(table, start - 1, out=out)


@pytest.mark.parametrize("wrong", [{"select_rows": off_by_one}], ids=["chunk positions off by one"])
def test_a_wrong_op_is_seen(wrong: dict[str, Callable[..., None]]) -> None:
    case = CASES[0]
    ops: OpTable = replace(reference_ops(), **wrong)
    session = decided(build(settings(), ops=ops), case)
    assert distance(moved(session, case), case["actions.10"] - case["noise"]) > 10 * BOUND


def altered(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """A copy of the recorded checkpoint with other weights."""
    shutil.copytree(FOLDER, folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    return folder


def zeroed(part: str) -> Callable[[dict[str, Tensor]], None]:
    def change(weights: dict[str, Tensor]) -> None:
        found = [name for name in weights if part in name]
        assert found
        for name in found:
            weights[name].zero_()

    return change


def wrong_weights() -> Iterator[str]:
    yield "layernorm.dense.weight"  # the expert forgets the time
    yield "norm.dense.weight"
    yield "language_model.layers.1.input_layernorm.weight"  # the norm weight is not folded
    yield "language_model.layers.2.input_layernorm.weight"
    yield "language_model.layers.1.post_attention_layernorm.weight"
    yield "position_embedding.weight"
    yield "multi_modal_projector.linear.bias"
    yield "time_mlp_in.bias"
    yield "embed_tokens.weight"


@pytest.mark.parametrize("part", list(wrong_weights()))
def test_every_kind_of_weight_matters(part: str, tmp_path: Path) -> None:
    case = CASES[0]
    policy = build(settings(checkpoint=str(altered(tmp_path / "altered", zeroed(part)))))
    session = decided(policy, case)
    assert distance(moved(session, case), case["actions.10"] - case["noise"]) > 10 * BOUND


def test_the_last_prefix_layer_is_followed_no_further_than_its_keys_and_values(tmp_path: Path) -> None:
    case = CASES[0]
    unread = zeroed("language_model.layers.2.mlp")
    policy = build(settings(checkpoint=str(altered(tmp_path / "altered", unread))))
    assert np.array_equal(decided(policy, case).read("actions"), decided(official(10), case).read("actions"))
