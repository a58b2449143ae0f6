"""Floors: by hand, against the figures that were worked out independently, and their use."""

from __future__ import annotations

from types import MappingProxyType

import pytest

from flashrt_ros.contract import Identity
from flashrt_ros.measure.devices import DEVICES, Device, device_named, device_of
from flashrt_ros.measure.errors import MeasureError
from flashrt_ros.measure.pi05.workload import workload
from flashrt_ros.measure.roofline import Floor, Work, counted_as, floor_of, floors, fractions
from flashrt_ros.policies.pi05.config import Pi05Config
from flashrt_ros.policies.pi05.plan import build_contract

TOY = Device("toy", MappingProxyType({"bf16": 1.0, "fp8": 2.0}), 1.0, True, "invented")


def true_size(views: int = 2, chunk: int = 10, plan: str = "split") -> dict[str, Work]:
    config = Pi05Config(
        views=("a", "b", "c")[:views],
        state_names=("s",),
        action_names=("s",),
        chunk=chunk,
        prompt_buckets=(200,),
        plan=plan,
    )
    contract = build_contract(config, Identity(policy="pi05", weights="none"))
    return workload(config, contract, contract.variants[0])


def test_four_bits_in_the_expert_alone_count_as_four_bits_where_no_tensor_core_takes_them() -> None:
    four = Device("toy", MappingProxyType({"bf16": 1.0, "fp8": 2.0, "fp4": 4.0}), 1.0, True, "invented")
    assert counted_as("4-bit-expert", TOY) == "4-bit"
    assert counted_as("4-bit-expert", four) is None
    assert counted_as("8-bit", TOY) == "8-bit"
    assert counted_as("mine.yaml", TOY) is None


def test_the_larger_of_the_two_times_is_the_floor() -> None:
    bound_by_compute = floor_of(Work(operations=3e9, weights=1e6, bytes=0), TOY, "16-bit")
    assert (bound_by_compute.compute_ms, bound_by_compute.memory_ms) == (3.0, 0.002)
    assert (bound_by_compute.ms, bound_by_compute.bound) == (3.0, "compute")
    bound_by_memory = floor_of(Work(operations=1e6, weights=1e9, bytes=5e8), TOY, "16-bit")
    assert (bound_by_memory.ms, bound_by_memory.bound) == (2.5, "memory")


def test_narrower_weights_halve_the_bytes_and_double_the_rate() -> None:
    work = Work(operations=4e9, weights=1e9, bytes=0)
    wide, narrow = floor_of(work, TOY, "16-bit"), floor_of(work, TOY, "8-bit")
    assert (wide.compute_ms, wide.memory_ms) == (4.0, 2.0)
    assert (narrow.compute_ms, narrow.memory_ms, narrow.format) == (2.0, 1.0, "fp8")


def test_without_4_bit_arithmetic_only_narrowed_stages_have_4_bit_weights() -> None:
    plain = floor_of(Work(operations=0, weights=1e9, bytes=0), TOY, "4-bit")
    narrowed = floor_of(Work(operations=0, weights=1e9, bytes=0, narrowed=True), TOY, "4-bit")
    assert (plain.format, plain.memory_ms) == ("fp8", 1.0)
    assert (narrowed.format, narrowed.memory_ms) == ("fp8", 0.5625)


def test_a_device_without_a_format_computes_in_the_next_wider_one() -> None:
    assert DEVICES["orin"].best("fp4") == "bf16"
    assert DEVICES["h200"].best("fp4") == "fp8"
    assert DEVICES["thor"].best("fp4") == "fp4"


def test_operations_and_bytes_of_the_true_size() -> None:
    """vision 0.42 TFLOP of projections, prefix 2.66, expert 10 × 311 M parameters."""
    work = true_size()
    assert work["vision"].operations == pytest.approx(0.44e12, rel=0.01)
    assert work["prefix"].operations == pytest.approx(2.74e12, rel=0.01)
    assert work["expert"].weights == pytest.approx(10 * 311e6, rel=0.005)


@pytest.mark.parametrize(("tier", "milliseconds"), [("16-bit", 5.8), ("8-bit", 3.2), ("4-bit", 2.9)])
def test_floor_of_a_decision_on_an_h200(tier: str, milliseconds: float) -> None:
    total = sum(floor.ms for floor in floors(true_size(), DEVICES["h200"], tier).values())
    assert total == pytest.approx(milliseconds, abs=0.06)


def test_both_plans_must_do_the_same() -> None:
    assert true_size(plan="full") == true_size(plan="split")


def test_more_views_and_longer_chunks_cost_more() -> None:
    small, large = true_size(2, 10), true_size(3, 50)
    assert all(large[stage].operations > small[stage].operations for stage in small)
    assert all(large[stage].bytes > small[stage].bytes for stage in small)


def test_fractions_are_floor_over_time() -> None:
    assert fractions({"vision": 2.0}, {"vision": Floor(1.0, 0.5, "bf16")}) == {"vision": 0.5}


def test_only_the_measured_device_is_called_measured() -> None:
    assert [name for name, device in DEVICES.items() if device.measured] == ["h200"]
    assert all(device.source for device in DEVICES.values())


def test_devices_are_found_by_both_names() -> None:
    assert device_of("thor") is DEVICES["thor"]
    assert device_named("NVIDIA H200") is DEVICES["h200"]
    assert device_named("NVIDIA H100") is None
    with pytest.raises(MeasureError, match="there are: h200, thor"):
        device_of("h100")
