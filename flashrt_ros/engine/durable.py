"""Durable capsules: one file that survives a reboot.

The file is a safetensors file, so any tool can read it: one uint8 tensor a region (its packed live bytes), one for the
noise generator, and a manifest in the metadata under "manifest". It is written to a temporary name, synchronised to
the disk and renamed, so that a kill at any moment leaves the old file or the new one, whole.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..contract import Contract, ContractError
from .arena import arena_offsets
from .capsule import Capsule, SessionState, Tier
from .errors import CapsuleFileError, CapsuleStorageError, DiskFullError, ForeignFileError, ReadOnlyError
from .keeper import input_windows
from .layout import Layout, live_layout
from .noise import state_bytes
from .payload import LEAST_PIECE, PIECE, PayloadReading, digest
from .versions import LedgerState

SCHEMA = 1
SUFFIX = ".capsule.safetensors"
_FORMAT = "flashrt_ros.capsule"
_HEADER = struct.Struct("<Q")  # safetensors: length of the JSON header, then the header, then the payload
_MAX_HEADER = 16 << 20

AnyPath = str | Path


def save_capsule(capsule: Capsule, path: Path) -> None:
    """Write `capsule` to `path`, replacing an older file only when the new one is whole.

    Raises:
        DiskFullError, ReadOnlyError, CapsuleStorageError: the old file, if any, is untouched.
    """
    payload = (capsule.host_bytes().numpy(), capsule.state.generator.numpy())
    header = _header(capsule, payload)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        _write_synchronised(temporary, (_HEADER.pack(len(header)), header, *(array.data for array in payload)))
        os.replace(temporary, path)
        _synchronise_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise storage_error(path, error) from None


def load_capsule(path: AnyPath, name: str | None = None) -> Capsule:
    """Read a capsule from `path`, checked to the last bit, into ordinary memory.

    Raises:
        ForeignFileError: not a capsule file, or of a schema that this version does not read.
        CapsuleFileError: truncated or altered; `field` says where.
        CapsuleStorageError: the file cannot be read.
    """
    try:
        file = os.open(path, os.O_RDONLY)  # a file object would take longer to make than the header to read
        try:
            return _load(path, file, name)
        finally:
            os.close(file)
    except OSError as error:
        raise storage_error(path, error) from None
    except CapsuleFileError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CapsuleFileError(path, "manifest", f"the manifest is malformed ({error})") from None


@dataclass(frozen=True)
class CapsuleDescription:
    """What a capsule file says of itself, without its payload."""

    name: str
    description: str
    keep: bool
    created_ns: int
    fingerprint: str
    nbytes: int
    notes: Mapping[str, str]


def describe_capsule(path: Path) -> CapsuleDescription:
    """Read the head of a capsule file; raises as `load_capsule` does, but does not look at the payload."""
    try:
        with open(path, "rb", buffering=0) as file:
            _, manifest = _parse_header(path, _read_header(path, file.fileno()))
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise storage_error(path, error) from None
    fields = ("name", "description", "keep", "created_ns", "fingerprint", "notes")
    try:
        return CapsuleDescription(nbytes=size, **{field: manifest[field] for field in fields})
    except KeyError as error:
        raise CapsuleFileError(path, str(error.args[0]), "the manifest is incomplete") from None


def _header(capsule: Capsule, payload: tuple[np.ndarray, np.ndarray]) -> bytes:
    ledger = capsule.state.ledger
    manifest = {
        "format": _FORMAT,
        "schema": SCHEMA,
        "name": capsule.name,
        "description": capsule.description,
        "keep": capsule.keep,
        "created_ns": capsule.created_ns,
        "fingerprint": capsule.fingerprint,
        "contract": capsule.contract.to_json(),
        "extents": dict(capsule.state.extents),
        "variant": ledger.variant,
        "versions": dict(ledger.versions),
        "consumed": dict(ledger.consumed),
        "ran_for": dict(ledger.ran_for),
        "notes": dict(capsule.state.notes),
        "unfilled": sorted(capsule.state.unfilled),
        "sha256": digest(*payload),
        "sha256_piece_bytes": PIECE,
    }
    text = json.dumps(manifest, sort_keys=True)
    manifest_digest = hashlib.sha256(text.encode()).hexdigest()
    entries: dict[str, Any] = {"__metadata__": {"manifest": text, "manifest_sha256": manifest_digest}}
    for name, (start, end) in _ranges(capsule.layout, sum(map(len, payload))).items():
        entries[name] = {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    return header + b" " * (-len(header) % 8)


def _ranges(layout: Layout, total: int) -> dict[str, tuple[int, int]]:
    """Where each tensor lies in the payload. Tensors touch each other, as the format demands: padding belongs to the
    tensor before it."""
    starts = [(f"region.{s.region.name}", s.packed) for s in layout.segments] + [("generator", layout.nbytes)]
    ends = [start for _, start in starts[1:]] + [total]
    return {name: (start, end) for (name, start), end in zip(starts, ends, strict=True)}


def _write_synchronised(path: Path, parts: tuple[bytes | memoryview, ...]) -> None:
    with open(path, "wb", buffering=0) as file:
        for part in parts:
            view = memoryview(part).cast("B")
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())


def _synchronise_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def storage_error(path: AnyPath, error: OSError) -> CapsuleStorageError:
    """The kind of CapsuleStorageError that `error` is, with the path and what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFullError(f"{path}: no space left on the disk; free some, or save elsewhere")
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return ReadOnlyError(f"{path}: the folder cannot be written ({error.strerror}); choose another folder")
    return CapsuleStorageError(f"{path}: {error.strerror or error}")


def _load(path: AnyPath, file: int, name: str | None) -> Capsule:
    header = _read_header(path, file)
    with _begin_reading(path, file, header) as payload:
        payload.finish_reading()
        tensors, manifest = _parse_header(path, header)  # meanwhile, and so on until the digest is asked for
        piece_bytes = _piece_bytes(path, manifest)
        contract, offsets = _contract(path, manifest)
        layout = live_layout(contract, offsets, manifest["extents"])
        _check_table(path, tensors, layout, len(payload.block) + len(payload.generator))
        capsule = _rebuild(manifest, payload, contract, layout, name)
        if manifest["sha256"] != payload.digest(piece_bytes):
            raise CapsuleFileError(path, "sha256", "the payload was altered")
    return capsule


def _read_header(path: AnyPath, file: int) -> bytes:
    """The header as it is; leaves `file` at the first byte of the payload."""
    length = _header_length(path, os.read(file, _HEADER.size))
    header = os.read(file, length)
    if len(header) < length:
        raise CapsuleFileError(path, "header", "truncated inside the header")
    return header


def _begin_reading(path: AnyPath, file: int, header: bytes) -> PayloadReading:
    """Read all that is left, taking its end for the generator's state; `_check_table` looks whether it is.

    Of a file that surely is no capsule nothing is read, as it may be of any size.
    """
    if _FORMAT.encode() not in header:
        _parse_header(path, header)  # which knows better why
        raise ForeignFileError(path, "format", "not a capsule file")
    start = _HEADER.size + len(header)
    size = os.lseek(file, 0, os.SEEK_END) - start
    block_bytes = max(0, size - state_bytes())
    return PayloadReading(file, start, block_bytes, size - block_bytes)


def _header_length(path: AnyPath, start: bytes) -> int:
    if len(start) < _HEADER.size:
        raise ForeignFileError(path, "header", "too short to be a capsule file")
    length = int(_HEADER.unpack(start)[0])
    if length > _MAX_HEADER:
        raise ForeignFileError(path, "header", "not a safetensors file")
    return length


def _parse_header(path: AnyPath, header: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        tensors = json.loads(header)
        metadata = tensors.pop("__metadata__")
        text = metadata["manifest"]
        manifest = json.loads(text)
        recorded = metadata.get("manifest_sha256")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ForeignFileError(path, "header", "no capsule manifest in it") from None
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise ForeignFileError(path, "format", "not a capsule file")
    if manifest.get("schema") != SCHEMA:
        reason = f"schema {manifest.get('schema')!r}, this version reads schema {SCHEMA}"
        raise ForeignFileError(path, "schema", reason)
    if recorded != hashlib.sha256(text.encode()).hexdigest():
        raise CapsuleFileError(path, "manifest", "the manifest was altered")
    return tensors, manifest


def _piece_bytes(path: AnyPath, manifest: Mapping[str, Any]) -> int:
    """The size of pieces that the payload was digested in when the file was written."""
    recorded = manifest.get("sha256_piece_bytes")
    if type(recorded) is not int or recorded < LEAST_PIECE:  # True is an int, too
        reason = f"pieces of {recorded!r} bytes are not digested; a size is a whole number from {LEAST_PIECE}"
        raise CapsuleFileError(path, "sha256_piece_bytes", reason)
    return recorded


@lru_cache(maxsize=8)
def _parsed(text: str) -> tuple[Contract, Mapping[str, int]]:
    """Capsules of one session carry the same contract, and checking it takes longer than reading the payload."""
    contract = Contract.from_json(text)
    return contract, arena_offsets(contract)[0]


def _contract(path: AnyPath, manifest: Mapping[str, Any]) -> tuple[Contract, Mapping[str, int]]:
    """The contract in a manifest, and where its buffers lie in an arena."""
    try:
        contract, offsets = _parsed(manifest["contract"])
    except (ContractError, KeyError, TypeError) as error:
        raise CapsuleFileError(path, "contract", f"the contract in it cannot be read ({error})") from None
    if contract.fingerprint != manifest.get("fingerprint"):
        raise CapsuleFileError(path, "fingerprint", "the fingerprint is not that of the contract in it")
    return contract, offsets


def _check_table(path: AnyPath, tensors: Mapping[str, Any], layout: Layout, payload_bytes: int) -> None:
    if {key: tuple(entry["data_offsets"]) for key, entry in tensors.items()} != _ranges(layout, payload_bytes):
        raise CapsuleFileError(path, "regions", "truncated, or the tensor table does not fit the contract")
    generator_bytes = payload_bytes - layout.nbytes
    if generator_bytes != state_bytes():
        raise CapsuleFileError(path, "generator", f"its {generator_bytes} bytes are no state of a generator")


def _rebuild(
    manifest: Mapping[str, Any], payload: PayloadReading, contract: Contract, layout: Layout, name: str | None
) -> Capsule:
    consumed = {key: None if seen is None else tuple(seen) for key, seen in manifest["consumed"].items()}
    versions = {buffer.name: manifest["versions"].get(buffer.name, 0) for buffer in contract.buffers}
    awaiting = {name for name in input_windows(contract) if not versions[name] or name in manifest["unfilled"]}
    ledger = LedgerState(versions, consumed, manifest["ran_for"], manifest["variant"], contents={}, unsaved={})
    state = SessionState(
        ledger,
        manifest["extents"],
        torch.from_numpy(payload.generator),
        manifest["notes"],
        frozenset(awaiting),
    )
    return Capsule(
        name=name or manifest["name"],
        contract=contract,
        state=state,
        layout=layout,
        block=torch.from_numpy(payload.block),
        tier=Tier.HOST,
        description=manifest["description"],
        keep=manifest["keep"],
        created_ns=manifest["created_ns"],
    )
