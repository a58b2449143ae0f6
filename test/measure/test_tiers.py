"""Calibrating, gating and running a tier, whole, on a checkpoint with random weights of a scaled initialisation."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flashrt_ros.cli import main
from flashrt_ros.measure.pi05 import tier_gate
from flashrt_ros.measure.pi05.calibrate import calibrate_tier
from flashrt_ros.measure.pi05.observations import Observation, make_observations
from flashrt_ros.measure.pi05.ours import Ours
from flashrt_ros.measure.pi05.tier_gate import Decided, compare
from flashrt_ros.measure.pi05.watched import Watched, observations_of
from flashrt_ros.policies import SettingsError
from flashrt_ros.policies.pi05 import build
from flashrt_ros.policies.pi05.sites import site_names
from flashrt_ros.policies.samples import Sample, SampleError
from flashrt_ros.precision.calibration import load_calibration
from flashrt_ros.precision.errors import CalibrationError
from flashrt_ros.precision.tier import load_tier
from test.measure.tiny import SIZES, pictures, settings

PIXELS = 480000


@pytest.fixture(scope="module")
def watched(folder: Path) -> Watched:
    return Watched(settings(folder), "cpu")


def seen(watched: Watched, count: int = 3, seed: int = 0) -> list[Observation]:
    return make_observations(watched.policy, count, pictures(), seed)


def command(name: str, folder: Path, images: list[str], *more: str) -> list[str]:
    sizes = {**SIZES, "dtype": "float32", "max_pixels": PIXELS}
    parts = [part for key, value in sizes.items() for part in ("--set", f"{key}={value}")]
    return [name, "--checkpoint", str(folder), *parts, "--images", *images, *more]


# -- calibrating -------------------------------------------------------------------------------------------------------


def test_every_product_is_reported_and_every_site_has_a_scale(folder: Path) -> None:
    watched = Watched(settings(folder), "cpu")
    made = calibrate_tier(watched, load_tier("8-bit"), seen(watched), source="a test")
    assert tuple(made.scales) == site_names(watched.policy.config)
    assert set(made.reports) == set(made.scales) - {"prefix.embedding"}
    steps = watched.policy.config.steps
    for site, report in made.reports.items():
        assert report.saturated == 0, site  # of the very observations, with headroom
        assert 0.005 < report.error < 0.06, site
        assert report.outlier >= 1, site
        rows = {"vision": 3 * watched.policy.config.image_rows, "expert": 3 * steps * watched.policy.chunk}
        assert report.rows == rows.get(site.split(".")[0], report.rows), site
    assert made.protocol["observations"] == 3


def test_prompt_padding_does_not_count(folder: Path) -> None:
    watched = Watched(settings(folder), "cpu")
    observations = seen(watched)
    made = calibrate_tier(watched, load_tier("8-bit"), observations, source="a test")
    live = sum(watched.policy.config.image_rows + len(item.tokens) for item in observations)
    assert made.reports["prefix.down.0"].rows == live


def test_equal_observations_give_an_equal_calibration(folder: Path) -> None:
    digests = set()
    for _ in range(2):
        watched = Watched(settings(folder), "cpu")
        digests.add(calibrate_tier(watched, load_tier("4-bit"), seen(watched), source="a test").digest)
    assert len(digests) == 1


def test_watching_decides_as_a_session_does(folder: Path) -> None:
    watched, ours = Watched(settings(folder), "cpu"), Ours.start(settings(folder), "cpu")
    (observation,) = seen(watched, 1)
    watched.watch([observation], lambda count: None)
    assert np.array_equal(ours.decide(observation), watched._arena["actions"].numpy())


def blank(watched: Watched) -> list[Observation]:
    config = watched.policy.config
    images = {view: np.zeros((32, 32, 3), np.uint8) for view in config.views}
    noise = np.zeros((config.chunk, config.padded_width), np.float32)
    return [Observation(images, np.zeros(3, np.int32), noise)]


def test_weights_of_zero_are_refused_with_the_site_that_never_moved(folder: Path) -> None:
    watched = Watched(settings(folder), "cpu")
    for layer in watched.policy.weights.vision.layers:
        layer.norm2.weight.zero_()
        layer.norm2.bias.zero_()
    with pytest.raises(CalibrationError, match=r"site 'vision\.up\.0': every value that entered it was zero"):
        calibrate_tier(watched, load_tier("8-bit"), blank(watched), source="a test")


def test_a_16_bit_tier_has_nothing_to_calibrate(watched: Watched) -> None:
    with pytest.raises(CalibrationError, match="nothing to calibrate"):
        calibrate_tier(watched, load_tier("16-bit"), seen(watched), source="a test")


def test_samples_become_observations_with_the_policy_s_own_prompt(watched: Watched) -> None:
    policy = watched.policy
    images = {view: np.full((20, 30, 3), 9, np.uint8) for view in (*policy.views, "unused")}
    state = np.zeros(len(policy.state_names), np.float32)
    (made,) = observations_of([Sample(images, state, "fold the towel", "here")], policy, 0)
    assert tuple(made.images) == policy.views
    tokens = policy.processor.tokens(policy.processor.text("fold the towel", state))
    assert np.array_equal(made.tokens, tokens[tokens >= 0])
    with pytest.raises(SampleError, match="here: the prompt holds the robot's state"):
        observations_of([Sample(images, None, "fold the towel", "here")], policy, 0)
    with pytest.raises(SampleError, match="here: the instruction is empty"):
        observations_of([Sample(images, state, "", "here")], policy, 0)


# -- the commands, one after the other ---------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["8-bit", "4-bit", "4-bit-expert", "4-bit-blackwell"])
def test_a_tier_is_calibrated_verified_and_started(
    folder: Path, images: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], tier: str
) -> None:
    calibration, out = tmp_path / "c.safetensors", tmp_path / "report.json"
    assert (
        main(command("calibrate", folder, images, "--tier", tier, "--out", str(calibration), "--photographs", "4")) == 0
    )
    said = capsys.readouterr()
    assert "largest error of a product" in said.out
    assert "0 of " in said.out
    assert "100 % of 8 observations" in said.err
    gate = ["--tier", tier, "--calibration", str(calibration), "--photographs", "4", "--seed", "7"]
    assert main(command("verify", folder, images, *gate, "--weights", "random, scaled", "--out", str(out))) == 0
    said = capsys.readouterr()
    assert said.out.rstrip().endswith("passed")
    report = json.loads(out.read_text())
    bar = load_tier(tier).fidelity
    assert bar.cosine_global <= report["cosine_global"] < 1
    assert bar.cosine_worst <= report["cosine_worst"] <= report["cosine_global"]
    assert list(report["actions"]) == list(build(settings(folder)).action_names)
    assert len(report["key_value"]) == SIZES["layers"]
    assert 0.001 < report["key_value"][0]["key"] < 0.3
    assert report["weights"] == "random, scaled"
    assert report["calibration"]["digest"] == load_calibration(calibration).digest
    started = build(settings(folder, precision=tier, calibration=str(calibration), max_pixels=PIXELS))
    assert started.fidelity.startswith("passed: cosine 0.99")
    assert started.contract.fingerprint == report["fingerprint"]


def test_a_tier_below_its_bar_fails_and_stays_out(folder: Path, images: list[str], tmp_path: Path) -> None:
    strict = tmp_path / "strict.yaml"
    text = 'tier: strict\nfidelity: {cosine_global: 1.0, cosine_worst: 1.0}\nrules:\n  - {sites: "*", weight: nvfp4, '
    strict.write_text(text + "activation: 16-bit, why: a test}\n")
    calibration = tmp_path / "c.safetensors"
    made = ["--tier", str(strict), "--photographs", "2"]
    assert main(command("calibrate", folder, images, *made, "--out", str(calibration))) == 0
    assert main(command("verify", folder, images, *made, "--calibration", str(calibration))) == 1
    with pytest.raises(SettingsError, match="tier 'strict' failed its fidelity gate: global cosine"):
        build(settings(folder, precision=str(strict), calibration=str(calibration), max_pixels=PIXELS))


def test_observations_come_from_a_folder_too(folder: Path, images: list[str], tmp_path: Path) -> None:
    state = [0.0] * 8
    views = dict(zip(build(settings(folder)).views, images, strict=True))
    lines = [{"images": views, "state": state, "instruction": f"pick up cup {i}"} for i in range(2)]
    (tmp_path / "observations.jsonl").write_text("\n".join(map(json.dumps, lines)))
    calibration = tmp_path / "c.safetensors"
    made = ["--tier", "8-bit", "--observations", str(tmp_path)]
    assert main(command("calibrate", folder, [], *made, "--out", str(calibration))) == 0
    assert load_calibration(calibration).protocol["source"] == str(tmp_path)
    assert main(command("verify", folder, [], *made, "--calibration", str(calibration))) == 0


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--tier", "8-bit"], "give either --observations PATH or --photographs N"),
        (["--tier", "8-bit", "--photographs", "1", "--observations", "x"], "give either"),
        (["--tier", "8-bit", "--photographs", "0"], "0 observations are none"),
        (["--tier", "9-bit", "--photographs", "1"], "unknown precision '9-bit'"),
        (["--tier", "16-bit", "--photographs", "1"], "nothing to calibrate"),
        (["--tier", "8-bit", "--observations", "/nowhere"], "cannot read '/nowhere/observations.jsonl'"),
        (["--tier", "8-bit", "--observations", "/nowhere.mcap"], "recording"),  # not there, or rosbags is not
        (
            ["--tier", "8-bit", "--observations", "/n.mcap", "--topic", "side=x"],
            "--topic 'side=x': expected NAME=TOPIC",
        ),
        (["--tier", "8-bit", "--photographs", "1", "--percentile", "3"], "percentile is 3"),
    ],
)
def test_mistakes_of_calibrate_are_told_in_one_line(
    folder: Path, images: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    out = tmp_path / "c.safetensors"
    assert main(command("calibrate", folder, images, "--out", str(out), *more)) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("flashrt: ")
    assert said in error
    assert not out.exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--tier", "8-bit", "--photographs", "1"], "--tier needs --calibration FILE"),
        (["--tier", "8-bit", "--photographs", "1", "--calibration", "/none"], "cannot read calibration '/none'"),
        (["--observations", "x"], "parity with LeRobot needs --checkpoint"),
    ],
)
def test_mistakes_of_verify_are_told_in_one_line(
    folder: Path, images: list[str], capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    assert main(command("verify", folder, images, *more)) == 2
    assert said in capsys.readouterr().err


def test_a_tier_is_benched_under_its_own_name(folder: Path, images: list[str], tmp_path: Path) -> None:
    calibration, out = tmp_path / "c.safetensors", tmp_path / "bench.json"
    case = ["--tokens", "100", "--photographs", "2"]
    made = ["--tier", "4-bit", "--case", "2x4", *case, "--out", str(calibration)]
    assert main(command("calibrate", folder, images, *made)) == 0
    tiered = ["precision=4-bit", f"calibration={calibration}", "unverified=true"]
    few = ["--cases", "2x4", "--tokens", "100", "--rounds", "1", "--calls", "1", "--out", str(out)]
    bench = command("bench", folder, images, *few, *(part for text in tiered for part in ("--set", text)))
    assert main([bench[0], "pi05", *bench[1:]]) == 0
    (result,) = json.loads(out.read_text())
    assert (result["tier"], result["views"], result["chunk"]) == ("4-bit", 2, 4)


# -- judging -----------------------------------------------------------------------------------------------------------


def judged(watched: Watched, change: Any = None, still: int | None = None) -> dict[str, Any]:
    """The report on actions that are the reference's own but for `change`; action `still` hardly moves."""
    config = dataclasses.replace(watched.policy.config, precision="8-bit")
    generator = np.random.default_rng(3)
    exact = [generator.standard_normal((config.chunk, config.padded_width), np.float32) for _ in range(4)]
    if still is not None:
        for chunk in exact:
            chunk[:, still] *= np.float32(1e-3)
    actions = [value.copy() for value in exact]
    if change is not None:
        change(actions)
    rows = [torch.ones(config.layers, 2, 3, config.key_width)] * 4
    return compare(config, Decided(exact, rows), Decided(actions, rows), exact)


def test_equal_actions_pass(watched: Watched) -> None:
    report = judged(watched)
    assert report["failures"] == []
    assert report["cosine_global"] == 1
    assert report["key_value"] == [{"key": 0, "value": 0}] * SIZES["layers"]


def test_one_bad_observation_fails_though_the_whole_is_good(watched: Watched) -> None:
    def shift(actions: list[np.ndarray]) -> None:
        actions[2] = actions[2] + np.float32(0.05)

    report = judged(watched, shift)
    assert any(text.startswith("worst cosine") for text in report["failures"])
    assert report["worst"] == 2


def test_one_bad_action_fails_though_the_whole_is_good(watched: Watched) -> None:
    def noisy(actions: list[np.ndarray]) -> None:
        for chunk in actions:
            chunk[:, 7] += np.random.default_rng(1).standard_normal(len(chunk)).astype(np.float32) / 10

    report = judged(watched, noisy)
    (failure,) = (text for text in report["failures"] if text.startswith("action"))
    assert failure.startswith("action 'panda_finger_joint1': cosine 0.99")


@pytest.mark.parametrize(("off", "fails"), [(0.005, False), (0.02, True)])
def test_an_action_that_hardly_moves_is_judged_by_how_far_it_is_off(watched: Watched, off: float, fails: bool) -> None:
    def shift(actions: list[np.ndarray]) -> None:
        for chunk in actions:
            chunk[:, 3] += np.float32(off)

    report = judged(watched, shift, still=3)
    assert report["actions"]["panda_joint4"]["cosine"] < 0.9
    assert any("panda_joint4" in text for text in report["failures"]) == fails


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_actions_that_are_not_finite_fail(watched: Watched, bad: float) -> None:
    def broken(actions: list[np.ndarray]) -> None:
        actions[1][0, 0] = bad

    report = judged(watched, broken)
    assert {text.split()[0] for text in report["failures"]} >= {"global", "worst", "action"}


def test_lerobot_as_the_reference_needs_a_checkpoint() -> None:
    plan = tier_gate.GatePlan({"preset": "pi05_tiny"}, "cpu", "lerobot", "seeded")
    with pytest.raises(Exception, match="LeRobot needs a checkpoint to load"):
        tier_gate._official(plan, [])
