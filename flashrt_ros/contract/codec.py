"""Canonical JSON of a contract, and the fingerprint over it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .buffers import Buffer, DType, Rate, Role
from .errors import ContractError
from .formats import SiteFormat
from .identity import Identity
from .regions import Extent, Region
from .stages import Stage, Variant

if TYPE_CHECKING:
    from .contract import Contract

SCHEMA = 1


def to_json(contract: Contract) -> str:
    """Canonical JSON with schema, fingerprint and documentation strings."""
    return _canonical(
        {
            "schema": SCHEMA,
            "fingerprint": contract.fingerprint,
            **_describe(contract, docs=True),
        }
    )


def fingerprint(contract: Contract) -> str:
    """SHA-256 over the canonical JSON without documentation strings."""
    described = {"schema": SCHEMA, **_describe(contract, docs=False)}
    return hashlib.sha256(_canonical(described).encode()).hexdigest()


def differences(one: Contract, other: Contract) -> tuple[str, ...]:
    """Identity fields first, then the parts of the description (buffers, stages, …) that differ."""
    a, b = _describe(one, docs=False), _describe(other, docs=False)
    parts = [key for key in dict.fromkeys((*a, *b)) if key != "identity" and a.get(key) != b.get(key)]
    return (*one.identity.differences(other.identity), *parts)


def from_json(text: str) -> Contract:
    """The contract that `to_json` described; ContractError names what is wrong with `text`."""
    data = _parse(text)
    contract = _build(data)
    if data.get("fingerprint") != contract.fingerprint:
        raise ContractError(
            f"contract '{contract.name}': the file says fingerprint {data.get('fingerprint')}, its content gives "
            f"{contract.fingerprint}; it was altered, export it again"
        )
    return contract


def _canonical(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def _describe(contract: Contract, *, docs: bool) -> dict[str, Any]:
    return {
        "name": contract.name,
        "identity": contract.identity.to_dict(),
        "buffers": [_buffer_dict(item, docs) for item in contract.buffers],
        "stages": [_stage_dict(item, docs) for item in contract.stages],
        "regions": [vars(item).copy() for item in contract.regions],
        "extents": [vars(item).copy() for item in contract.extents],
        "variants": [{"name": item.name, "dims": dict(item.dims)} for item in contract.variants],
        # Left out where there are none, so that a contract without a tier keeps its fingerprint.
        **({"formats": [vars(item).copy() for item in contract.formats]} if contract.formats else {}),
    }


def _buffer_dict(buffer: Buffer, docs: bool) -> dict[str, Any]:
    return {
        "name": buffer.name,
        "shape": list(buffer.shape),
        "dtype": buffer.dtype.value,
        "role": buffer.role.name,
        "rate": None if buffer.rate is None else buffer.rate.name,
        **({"doc": buffer.doc} if docs else {}),
    }


def _stage_dict(stage: Stage, docs: bool) -> dict[str, Any]:
    return {
        "name": stage.name,
        "rate": stage.rate.name,
        "reads": list(stage.reads),
        "writes": list(stage.writes),
        "after": list(stage.after),
        "variants": list(stage.variants),
        **({"doc": stage.doc} if docs else {}),
    }


def _parse(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ContractError(f"not a contract: invalid JSON ({error})") from None
    if not isinstance(data, dict) or "schema" not in data:
        raise ContractError("not a contract: expected a JSON object with a 'schema' field")
    if data["schema"] != SCHEMA:
        raise ContractError(f"contract schema {data['schema']!r} is not supported, this version reads schema {SCHEMA}")
    return data


def _build(data: Mapping[str, Any]) -> Contract:
    from .contract import Contract

    try:
        return Contract(
            name=data["name"],
            identity=Identity(**data["identity"]),
            buffers=tuple(_buffer_from(item) for item in data["buffers"]),
            stages=tuple(Stage(**{**item, "rate": Rate[item["rate"]]}) for item in data["stages"]),
            regions=tuple(Region(**item) for item in data["regions"]),
            extents=tuple(Extent(**item) for item in data["extents"]),
            variants=tuple(Variant(**item) for item in data["variants"]),
            formats=tuple(SiteFormat(**item) for item in data.get("formats", ())),
        )
    except ContractError:
        raise
    except KeyError as error:
        raise ContractError(f"not a contract: field or name {error} is missing or unknown") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise ContractError(f"not a contract: {error}") from None


def _buffer_from(item: Mapping[str, Any]) -> Buffer:
    rate = item["rate"]
    converted = {
        "dtype": DType(item["dtype"]),
        "role": Role[item["role"]],
        "rate": None if rate is None else Rate[rate],
    }
    return Buffer(**{**item, **converted})
