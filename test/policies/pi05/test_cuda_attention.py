"""Which attention kernels a policy gets, and what the report says of those that it does not get; no GPU is needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flashrt_ros.ops.report import KernelReport
from flashrt_ros.policies.pi05 import Pi05Config
from flashrt_ros.policies.pi05.cuda_attention import IMAGE, LIBRARY, OWN, PREFIX, Attentions

NAMES = tuple(f"joint_{i}" for i in range(7))
CPU = torch.device("cpu")


def attentions(*, fused: bool = True, **changed: Any) -> Attentions:
    config = replace(Pi05Config(views=("left",), state_names=NAMES, action_names=NAMES, chunk=10), **changed)
    return Attentions(config, CPU, overlap=False, fused=fused)


def reports(found: Attentions) -> dict[str, KernelReport]:
    return {report.op: report for report in found.reports()}


@pytest.mark.parametrize(
    "changed",
    [{}, {"views": ("left", "right", "wrist")}, {"image_size": 112}, {"image_size": 112, "vision_heads": 16 * 3}],
    ids=str,
)
def test_images_that_the_kernel_has_registers_for_get_it(changed: dict[str, Any]) -> None:
    assert reports(attentions(**changed))[IMAGE] == KernelReport(IMAGE, OWN)


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"image_size": 448}, "1024 and 72"),
        ({"image_size": 140}, "100 and 72"),
        ({"vision_heads": 18}, "256 and 64"),
        ({"vision_heads": 8}, "256 and 144"),
    ],
)
def test_other_images_are_pytorchs_and_the_report_says_why(changed: dict[str, Any], found: str) -> None:
    made = attentions(**changed)
    assert not made.is_own(IMAGE)
    assert reports(made)[IMAGE] == KernelReport(
        IMAGE,
        LIBRARY,
        "image_attention.cu takes images of a multiple of 64 tokens up to 256 and heads of an odd multiple of 8 from "
        f"24 to 120, found {found}",
    )


def test_where_the_prefix_kernel_cannot_run_the_report_says_so() -> None:
    found = reports(attentions())[PREFIX]
    assert found == KernelReport(PREFIX, LIBRARY, "prefix_attention.cu runs on a GPU, the tensors are on 'cpu'")
    assert found.fallback


def test_a_choice_can_be_taken_back() -> None:
    made = attentions()
    made.choose(IMAGE, "self-test: 0.7 away")
    assert reports(made)[IMAGE] == KernelReport(IMAGE, LIBRARY, "self-test: 0.7 away")
    made.choose(IMAGE, "")
    assert reports(made)[IMAGE] == KernelReport(IMAGE, OWN)


def test_without_own_kernels_both_are_pytorchs() -> None:
    assert {report.kernel for report in attentions(fused=False).reports()} == {LIBRARY}
