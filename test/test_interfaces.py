"""The messages and services: what their files declare, and that the built ones are those."""

from __future__ import annotations

import importlib
import math
from array import array
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rclpy.serialization import deserialize_message, serialize_message
from rosidl_adapter.parser import (
    Constant,
    Field,
    MessageSpecification,
    ServiceSpecification,
    parse_message_file,
    parse_service_file,
)

from flashrt_ros.msg import ActionChunk, CapsuleResult, EngineStatus, Refusal, StreamStatus
from flashrt_ros.node.chunk_checks import FaultCode
from flashrt_ros.node.freshness import Reason
from test.sources import PACKAGE, ROOT

MESSAGES: dict[str, MessageSpecification] = {
    path.stem: parse_message_file(PACKAGE, str(path)) for path in sorted((ROOT / "msg").glob("*.msg"))
}
SERVICES: dict[str, ServiceSpecification] = {
    path.stem: parse_service_file(PACKAGE, str(path)) for path in sorted((ROOT / "srv").glob("*.srv"))
}

ACTION_CHUNK = {
    "stamp": "builtin_interfaces/Time",
    "dt": "builtin_interfaces/Duration",
    "valid_until": "builtin_interfaces/Time",
    "oldest_observation_stamp": "builtin_interfaces/Time",
    "inference_start": "builtin_interfaces/Time",
    "inference_duration": "builtin_interfaces/Duration",
    "session": "string",
    "epoch": "uint64",
    "chunk_id": "uint64",
    "joint_names": "sequence<string>",
    "horizon": "uint32",
    "data": "sequence<float>",
    "frozen_prefix": "uint32",
    "instruction": "string",
    "fingerprint": "string",
    "capsule": "string",
}
ENGINE_STATUS = {
    "state", "policy", "checkpoint", "fingerprint", "plan", "precision", "fidelity", "kernels", "epoch",
    "latency", "rate", "streams", "capsule_count", "capsule_device_bytes", "capsule_host_bytes", "capsule_disk_bytes",
}  # fmt: skip
CAUSES = {
    "SUCCESS", "NOT_AVAILABLE", "INACTIVE", "BUSY", "MID_STAGE", "BAD_NAME", "UNKNOWN_NAME", "ALREADY_EXISTS",
    "FINGERPRINT_MISMATCH", "BUDGET_FULL", "DISK_FULL", "READ_ONLY", "FILE_CORRUPT", "INTERNAL",
}  # fmt: skip


def specifications() -> Iterable[tuple[str, MessageSpecification]]:
    """Every message, and both halves of every service, by the name to show."""
    yield from MESSAGES.items()
    for name, service in SERVICES.items():
        yield f"{name}.Request", service.request
        yield f"{name}.Response", service.response


def built(name: str) -> Any:
    """The generated class of a message, or of one half of a service."""
    if name in MESSAGES:
        return getattr(importlib.import_module("flashrt_ros.msg"), name)
    service, half = name.split(".")
    return getattr(getattr(importlib.import_module("flashrt_ros.srv"), service), half)


def generated_type(field: Field) -> str:
    """How the generated class spells the type of a field that a file declares."""
    plain = {"float32": "float", "float64": "double", "bool": "boolean"}
    kind = field.type
    base = kind.type if kind.is_primitive_type() else f"{kind.pkg_name}/{kind.type}"
    name = plain.get(base, base)
    return f"sequence<{name}>" if kind.is_array else name


@pytest.mark.parametrize(("name", "specification"), specifications())
def test_every_field_and_constant_is_explained(name: str, specification: MessageSpecification) -> None:
    entries: list[Field | Constant] = [*specification.fields, *specification.constants]
    mute = [entry.name for entry in entries if not entry.annotations.get("comment")]
    assert not mute


@pytest.mark.parametrize(("name", "specification"), specifications())
def test_numbers_of_constants_are_unique(name: str, specification: MessageSpecification) -> None:
    values = [constant.value for constant in specification.constants]
    assert len(values) == len(set(values))


@pytest.mark.parametrize(("name", "specification"), specifications())
def test_the_built_interface_is_that_of_the_file(name: str, specification: MessageSpecification) -> None:
    declared = {field.name: generated_type(field) for field in specification.fields}
    cls = built(name)
    found = dict(cls.get_fields_and_field_types())
    found.pop("structure_needs_at_least_one_member", None)
    assert found == declared
    assert all(getattr(cls, constant.name) == constant.value for constant in specification.constants)


def test_an_action_chunk_says_when_from_what_and_under_which_plan() -> None:
    assert ActionChunk.get_fields_and_field_types() == ACTION_CHUNK


def test_the_status_says_what_runs_and_how_it_fares() -> None:
    assert EngineStatus.get_fields_and_field_types().keys() >= ENGINE_STATUS
    assert StreamStatus.get_fields_and_field_types().keys() >= {"rate", "age", "refusals"}


@pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES.keys())
def test_services_share_one_set_of_failure_causes(service: ServiceSpecification) -> None:
    first = service.response.fields[0]
    assert (first.name, str(first.type)) == ("result", "flashrt_ros/CapsuleResult")
    assert not service.request.constants
    assert not service.response.constants


def test_the_failure_causes_are_complete_and_a_fresh_result_is_no_failure() -> None:
    assert {constant.name for constant in MESSAGES["CapsuleResult"].constants} >= CAUSES
    assert CapsuleResult().cause == CapsuleResult.SUCCESS == 0


@pytest.mark.parametrize("name", ["Restore", "Fork"])
def test_a_refused_fingerprint_names_the_fields_that_differ(name: str) -> None:
    assert built(f"{name}.Response").get_fields_and_field_types()["differing_fields"] == "sequence<string>"


def test_a_snapshot_is_asked_for_by_name_with_its_flags() -> None:
    fields = built("Snapshot.Request").get_fields_and_field_types()
    assert fields.keys() >= {"name", "description", "keep", "durable"}


def test_every_reason_of_the_node_has_its_number_in_the_interface() -> None:
    assert {reason.name: reason.value for reason in Reason} == {
        reason.name: getattr(Refusal, reason.name) for reason in Reason
    }
    # Faults of chunks have a range of their own, fifty above the numbers that the checks use.
    assert {fault.name: fault.value + 50 for fault in FaultCode} == {
        fault.name: getattr(Refusal, fault.name) for fault in FaultCode
    }


@given(
    data=st.lists(st.floats(width=32, allow_nan=False), max_size=64),
    joint_names=st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), max_size=4),
    chunk_id=st.integers(0, 2**64 - 1),
    capsule=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
)
def test_an_action_chunk_survives_the_wire(
    data: list[float], joint_names: list[str], chunk_id: int, capsule: str
) -> None:
    chunk = ActionChunk(data=array("f", data), joint_names=joint_names, chunk_id=chunk_id, capsule=capsule, horizon=3)
    assert deserialize_message(serialize_message(chunk), ActionChunk) == chunk


def test_numbers_that_are_not_finite_survive_the_wire() -> None:
    sent = ActionChunk(data=array("f", [math.nan, math.inf, -math.inf]))
    received = deserialize_message(serialize_message(sent), ActionChunk)
    assert [str(value) for value in received.data] == ["nan", "inf", "-inf"]
