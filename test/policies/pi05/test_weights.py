"""Packing weights, and asking how much room they take without their values."""

from __future__ import annotations

import subprocess
import sys

import torch

from flashrt_ros.policies.pi05.seeded import seeded_source
from flashrt_ros.policies.pi05.settings import resolve
from flashrt_ros.policies.pi05.sites import site_matrices
from flashrt_ros.policies.pi05.tiers import weight_bytes
from flashrt_ros.policies.pi05.weights import load_weights
from test.policies.pi05.tiny import SMALL
from test.sources import checkout_environment


def test_room_is_asked_for_without_what_takes_a_second_to_import() -> None:
    # Arithmetic on PyTorch's meta device imports its compiler, and sympy with it.
    program = """
import sys
from flashrt_ros.measure.pi05.checkpoint import checkpoint_config
from flashrt_ros.policies.pi05.memory import needed_bytes
assert needed_bytes(checkpoint_config("pi05", precision="8-bit")) > 8e9
print(sorted({"sympy", "torch._dynamo"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=checkout_environment())
    assert done.stdout == "[]\n", done.stderr


def test_shapes_alone_are_those_of_the_weights() -> None:
    config = resolve({**SMALL, "dtype": "bfloat16"}).config
    shapes, weights = (load_weights(seeded_source(config), config, torch.device(name)) for name in ("meta", "cpu"))
    assert weight_bytes(shapes) == weight_bytes(weights)
    matrices = site_matrices(weights)
    assert {site: m.shape for site, m in site_matrices(shapes).items()} == {s: m.shape for s, m in matrices.items()}


def test_every_view_has_the_position_of_the_source() -> None:
    config = resolve(SMALL).config
    source = seeded_source(config)
    embeddings = "paligemma_with_expert.paligemma.model.vision_tower.vision_model.embeddings"
    position = source.tensor(f"{embeddings}.position_embedding.weight")
    expected = position + source.tensor(f"{embeddings}.patch_embedding.bias")
    made = load_weights(source, config, torch.device("cpu")).vision.position
    assert len(config.views) > 1
    assert torch.equal(made.view(len(config.views), *position.shape), expected.expand(len(config.views), -1, -1))
