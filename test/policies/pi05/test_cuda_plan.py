"""The choice between fused stages and references, as far as it needs no GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashrt_ros.ops.report import KernelReport
from flashrt_ros.policies.pi05.config import Pi05Config
from flashrt_ros.policies.pi05.cuda_plan import unsuited, with_less

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


@pytest.mark.parametrize(
    ("broken", "left_out"),
    [
        (set(), set()), ({"attention"}, {"attention"}), ({"products"}, {"products"}),
        ({"attention", "products"}, {"attention", "products"}),
    ],
)  # fmt: skip
def test_as_little_as_possible_is_left_out_of_a_part(broken: set[str], left_out: set[str]) -> None:
    reasons = {"attention": "", "products": ""}

    def compare() -> KernelReport:
        wrong = [step for step in broken if not reasons[step]]
        return KernelReport("vision", reason="far away" if wrong else "")

    report = with_less(tuple(reasons), reasons.__setitem__, compare)
    assert not report.fallback
    assert {step for step, reason in reasons.items() if reason} == left_out
    assert {reason for reason in reasons.values() if reason} <= {"far away"}


def test_a_part_that_disagrees_without_any_step_is_refused_for_its_first_reason() -> None:
    told = iter(["first", "second", "third", "fourth", "fifth"])
    report = with_less(("a", "b"), lambda *_: None, lambda: KernelReport("prefix", reason=next(told)))
    assert report.reason == "first"
    assert next(told) == "fifth"  # the whole, each of two steps, both
    assert with_less((), lambda *_: None, lambda: KernelReport("prefix", reason="no")).reason == "no"
