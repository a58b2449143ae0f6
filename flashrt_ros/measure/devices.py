"""How fast devices can compute and move data at most: one table, measured where we could, data sheets elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from .errors import MeasureError


@dataclass(frozen=True)
class Device:
    """Ceilings of one device.

    Attributes:
        compute: dense matrix products in TFLOP/s, by format ("bf16", "fp8", "fp4"); a format that is absent does not
            exist there.
        memory: TB/s.
        measured: whether we measured these; otherwise they are a data sheet's, and every time made of them is a
            prediction.
        source: where they come from.
    """

    name: str
    compute: Mapping[str, float]
    memory: float
    measured: bool
    source: str

    def best(self, wanted: str) -> str:
        """The format to compute in where `wanted` is asked for: the narrowest one that exists and is not narrower."""
        order = ("fp4", "fp8", "bf16")
        return next(format_ for format_ in order[order.index(wanted) :] if format_ in self.compute)


DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        "h200": Device(
            "NVIDIA H200",
            MappingProxyType({"bf16": 732.0, "fp8": 1286.0}),
            4.21,
            True,
            "measured: matrix products of 712 rows (the prefix's gate and up), device-to-device copy",
        ),
        "thor": Device(
            "Jetson Thor (T5000)",
            MappingProxyType({"bf16": 258.0, "fp8": 517.0, "fp4": 1035.0}),
            0.273,
            False,
            "data sheet, dense: 2070 TFLOP/s sparse FP4, halved for each step of format and for sparsity",
        ),
        "rtx5090": Device(
            "GeForce RTX 5090",
            MappingProxyType({"bf16": 209.5, "fp8": 419.0, "fp4": 1676.0}),
            1.792,
            False,
            "data sheet, dense, accumulating in float32",
        ),
        "orin": Device(
            "Jetson AGX Orin 64 GB",
            MappingProxyType({"bf16": 42.5}),
            0.2048,
            False,
            "data sheet, dense: 170 TOPS sparse INT8 of the GPU, halved for 16 bits and for sparsity",
        ),
    }
)


def device_of(name: str) -> Device:
    """The device called `name`; MeasureError with the known ones otherwise."""
    if name not in DEVICES:
        raise MeasureError(f"no ceilings are known for '{name}'; there are: {', '.join(DEVICES)}")
    return DEVICES[name]


def device_named(gpu: str) -> Device | None:
    """The device whose name as CUDA tells it is `gpu`, or None."""
    return next((device for device in DEVICES.values() if device.name == gpu), None)
