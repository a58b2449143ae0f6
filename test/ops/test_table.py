from __future__ import annotations

from dataclasses import fields, replace

import flashrt_ros.ops
from flashrt_ros.ops import OpTable, reference_ops
from flashrt_ros.ops.linear import geglu


def kernel(*_: object, **__: object) -> None: ...


def test_the_reference_table_replaces_nothing() -> None:
    assert reference_ops().replaced() == ()


def test_a_replaced_op_is_reported_by_name() -> None:
    assert replace(reference_ops(), geglu=kernel).replaced() == ("geglu",)


def test_every_field_is_named_after_its_reference() -> None:
    table = reference_ops()
    assert all(getattr(table, field.name).__name__ == field.name for field in fields(OpTable))
    assert table.geglu is geglu
    assert flashrt_ros.ops.reference_ops is reference_ops
