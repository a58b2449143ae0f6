"""The node with pi05_tiny in a tier: it starts only where the gate was passed, and tells what the gate found."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashrt_ros.cli import main
from flashrt_ros.policies import build_policy
from flashrt_ros.precision.fidelity import Result, record
from flashrt_ros.precision.tier import load_tier
from test.node.rig import Rig, record_chunks, record_errors, record_status
from test.node.test_pi05_node import arm, policy_settings, tiny_node


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibration") / "tiny.safetensors"
    settings = [part for key, value in policy_settings().items() for part in ("--set", f"{key}={value}")]
    assert main(["calibrate", "--tier", "8-bit", *settings, "--photographs", "2", "--out", str(path)]) == 0
    return path


def test_a_tier_that_was_not_verified_fails_to_configure_and_says_what_to_do(rig: Rig, calibration: Path) -> None:
    errors = record_errors(rig)
    node = tiny_node(rig, {"policy.precision": "8-bit", "policy.calibration": str(calibration)})
    assert not node.transition("configure")
    text = errors.wait_for(lambda message: message.msg.startswith("configure failed: "), "the reason is logged").msg
    assert "tier '8-bit' has not passed its fidelity gate" in text
    assert "run `flashrt verify --tier`" in text


def test_a_tier_that_passed_publishes_chunks_and_its_verdict(rig: Rig, calibration: Path) -> None:
    settings = {**policy_settings(), "precision": "8-bit", "calibration": str(calibration)}
    policy = build_policy("pi05", {**settings, "unverified": True})
    passed = Result(0.99999, 0.9999, "float32", 5, load_tier("8-bit").fidelity, ())
    record(calibration, policy.contract.fingerprint, passed, {})
    arm(rig)
    chunks, statuses = record_chunks(rig), record_status(rig)
    node = tiny_node(rig, {"policy.precision": "8-bit", "policy.calibration": str(calibration)})
    assert node.transition("configure")
    assert node.transition("activate")
    chunk = chunks.next(timeout=60)[0]
    status = statuses.wait_for(lambda message: message.policy, "a status")
    assert chunk.fingerprint == policy.contract.fingerprint == status.fingerprint
    assert status.precision == policy.contract.identity.precision
    assert status.fidelity.startswith("passed: cosine 0.999990, worst 0.999900 of 5 observations")
