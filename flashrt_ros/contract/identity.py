"""Identity: the facts outside the stage graph that decide what a contract's bytes mean."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields


@dataclass(frozen=True)
class Identity:
    """What the bytes in the buffers mean. Two contracts with unequal identities never share a capsule.

    `weights` and `normalisation` are SHA-256 digests; `kernels` names the set of kernels and its digest;
    `architecture` is the device the bits were made on ("cpu", "sm_90a"), because bits differ between devices.
    """

    policy: str
    weights: str
    precision: str = "float32"
    kernels: str = "reference"
    views: tuple[str, ...] = ()
    chunk: int = 1
    horizon: int = 1
    embodiment: str = ""
    normalisation: str = ""
    architecture: str = "cpu"

    def __post_init__(self) -> None:
        object.__setattr__(self, "views", tuple(self.views))

    def to_dict(self) -> dict[str, object]:
        """The fields as plain JSON values."""
        return {**asdict(self), "views": list(self.views)}

    def differences(self, other: Identity) -> tuple[str, ...]:
        """Names of the fields that differ, in declaration order."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name))
