"""The choice between fused stages and references, as far as it needs no GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashrt_ros.policies.pi05.config import Pi05Config
from flashrt_ros.policies.pi05.cuda_plan import unsuited

NAMES = ("a", "b")
CONFIG = Pi05Config(views=("left", "right"), state_names=NAMES, action_names=NAMES, chunk=10)


@pytest.mark.parametrize("capability", [(9, 0), (11, 0), (12, 0)])
def test_the_true_size_suits(capability: tuple[int, int]) -> None:
    assert unsuited(CONFIG, capability) == ""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float32"}, "configured for float32"),
        ({"expert_width": 512}, "written for expert_width 1024, the policy has 512"),
        ({"query_heads": 4}, "written for query_heads 8, the policy has 4"),
        ({"eps": 1e-5}, "written for eps 1e-06, the policy has 1e-05"),
        ({"language_hidden": 16000}, "language_hidden in multiples of 4096"),
        ({"chunk": 65}, "takes 64 actions and 1024 keys, the policy has 65"),
        ({"prompt_buckets": (600,)}, "and 1122"),
    ],
)
def test_another_size_is_refused_with_the_reason(change: dict[str, object], reason: str) -> None:
    assert reason in unsuited(replace(CONFIG, **change), (9, 0))  # type: ignore[arg-type]


def test_an_old_gpu_is_refused() -> None:
    assert unsuited(CONFIG, (8, 7)) == "fused kernels need compute capability 9.0, this GPU has 8.7"
