"""Which model and which environment a verdict is about."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .calls import CompleteCall
from .registry import available_structures
from .values import signature

_PACKAGES = ("flashrt_ros", "torch", "triton", "transformers", "lerobot", "diffusers", "timm", "cuda-core")


def model_identity(call: CompleteCall) -> dict[str, str]:
    """Digests of the weights, of the modules around them, and of what the examples look like."""
    return {
        "class": _qualified(type(call.model)),
        "method": call.method,
        "weights": weights_digest(call.model),
        "structure": structure_digest(call.model),
        "examples": _sha(repr(sorted(repr(signature(args, kwargs)) for args, kwargs in call.examples)).encode()),
    }


def weights_digest(model: nn.Module) -> str:
    """SHA-256 over name, dtype, shape and bytes of every parameter and buffer; independent of where they are."""
    with ThreadPoolExecutor() as pool:  # hashing releases the interpreter
        return _sha(b"".join(pool.map(lambda pair: _tensor_digest(*pair), _named_tensors(model))))


def structure_digest(model: nn.Module) -> str:
    """SHA-256 over path, class, plain settings and mode of every module."""
    lines = (
        f"{path} {_qualified(type(module))} {module.extra_repr()} {module.training}"
        for path, module in model.named_modules()
    )
    return _sha("\n".join(lines).encode())


def environment() -> dict[str, str]:
    """Everything outside the model that decides whether something is faster, and which bits it computes."""
    facts = {"python": platform.python_version(), "machine": platform.machine(), "cpu": _cpu()}
    facts["threads"] = str(torch.get_num_threads())
    facts |= {name: version for name in _PACKAGES if (version := _version(name))}
    facts["torch"] = str(torch.__version__)
    facts["matmul_precision"] = torch.get_float32_matmul_precision()
    facts["structures"] = ",".join(sorted(structure.name for structure in available_structures()))
    return facts | (_gpu() if torch.cuda.is_available() else {})


def _gpu() -> dict[str, str]:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
        "tf32": str(torch.backends.cuda.matmul.allow_tf32),
    }


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from sorted((*model.named_parameters(), *model.named_buffers()))


def _tensor_digest(name: str, tensor: Tensor) -> bytes:
    sha = hashlib.sha256(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
    sha.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return sha.digest()


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cpu() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return f"{model or platform.processor()}, {os.cpu_count()} cores"


def differences(found: dict[str, Any], recorded: dict[str, Any]) -> list[str]:
    """Names of entries that are not equal, sorted."""
    return sorted(name for name in {**found, **recorded} if found.get(name) != recorded.get(name))
