"""What the row kernels assume of memory is checked before anything is launched; so no GPU is needed here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flashrt_ros.ops.cuda import gemm
from flashrt_ros.ops.cuda import rows as kernels
from flashrt_ros.ops.cuda.boundary import demand_dense, demand_device, made_dense
from flashrt_ros.ops.cuda.errors import KernelError
from flashrt_ros.ops.cuda.kernel import converted
from flashrt_ros.ops.cuda.rows import Quantiser

ROWS, WIDTH = 6, 2048
Arguments = dict[str, Any]


def bf16(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.bfloat16)


def floats(*shape: int) -> Tensor:
    return torch.ones(*shape)


CALLS: dict[str, tuple[Callable[..., None], Callable[[], Arguments]]] = {
    "layer_norm": (
        lambda **a: kernels.layer_norm(a.pop("x"), a.pop("weight"), a.pop("bias"), eps=1e-6, **a),
        lambda: {
            "x": bf16(ROWS, WIDTH), "weight": bf16(WIDTH), "bias": bf16(WIDTH), "out": bf16(ROWS, WIDTH),
            "branch": bf16(ROWS, WIDTH),
        },
    ),
    "residual_rms_norm": (
        lambda **a: kernels.residual_rms_norm(a.pop("residual"), a.pop("branch"), eps=1e-6, **a),
        lambda: {"residual": bf16(ROWS, WIDTH), "branch": bf16(3, ROWS + 2, WIDTH), "out": bf16(ROWS, WIDTH)},
    ),
    "gated_residual_ada_rms_norm": (
        lambda **a: kernels.gated_residual_ada_rms_norm(
            a["residual"], a["branch"], a["gate"], a["modulation"], eps=1e-6, out=a["out"]
        ),
        lambda: {
            "residual": bf16(ROWS, WIDTH), "branch": bf16(ROWS, WIDTH), "gate": floats(WIDTH),
            "modulation": floats(3, WIDTH), "out": bf16(ROWS, WIDTH),
        },
    ),
    "split_rope_write": (
        lambda **a: kernels.split_rope_write(a.pop("qkv"), a.pop("rope"), eps=1e-6, **a),
        lambda: {
            "qkv": bf16(ROWS, 2560), "rope": bf16(ROWS, 256), "query": bf16(ROWS, 8, 256), "key": bf16(ROWS, 1, 256),
            "value": bf16(ROWS, 1, 256), "residual": bf16(ROWS, WIDTH),
        },
    ),
    "geglu": (
        lambda **a: kernels.geglu(a.pop("gate_up"), eps=1e-6, **a),
        lambda: {"gate_up": bf16(ROWS, 8192), "out": bf16(ROWS, 4096), "residual": bf16(ROWS, WIDTH)},
    ),
    "quantise": (
        lambda **a: kernels.quantise(a["x"], Quantiser(a["scale"]), out=a["out"]),
        lambda: {"x": bf16(ROWS, WIDTH), "scale": floats(1), "out": bf16(ROWS, WIDTH).to(kernels.CODES)},
    ),
    "pixels_to_patches": (
        lambda **a: kernels.pixels_to_patches(a["pixels"], a["pixel_format"], patch=14, out=a["out"]),
        lambda: {
            "pixels": torch.zeros(3 * 28 * 28, dtype=torch.uint8), "pixel_format": torch.ones(4, dtype=torch.int32),
            "out": bf16(4, 592),
        },
    ),
    "inverse_rms_rows": (
        lambda **a: gemm.inverse_rms_rows(a["x"], eps=1e-6, out=a["out"]),
        lambda: {"x": bf16(ROWS, WIDTH), "out": floats(ROWS)},
    ),
}  # fmt: skip


def expanded(tensor: Tensor) -> Tensor:
    """One row, or one value, that stands for all: the kernel would read what lies behind it."""
    return tensor[:1].expand(tensor.shape)


def part_of_wider_rows(tensor: Tensor) -> Tensor:
    """The kernel would read the rest of the first rows as the next ones."""
    return torch.cat((tensor, tensor), -1)[..., : tensor.shape[-1]]


def every_other(tensor: Tensor) -> Tensor:
    return torch.stack((tensor, tensor), -1).flatten(-2)[..., ::2]


def of_another_type(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64)


def shifted(tensor: Tensor) -> Tensor:
    """Dense, but not from a multiple of 16 bytes on."""
    return torch.cat((tensor.flatten()[:1], tensor.flatten()))[1:].view(tensor.shape)


SPOILED = [
    (op, name, spoil)
    for op, (_, make) in CALLS.items()
    for name, tensor in make().items()
    for spoil in (expanded, part_of_wider_rows, every_other, of_another_type, shifted)
    if (spoil is of_another_type or tensor.numel() > 1)
    and (spoil is not part_of_wider_rows or tensor.ndim > 1)
    and (spoil is not shifted or tensor.dtype == torch.bfloat16)  # all else is read value by value
]


@pytest.mark.parametrize("op", CALLS)
def test_what_is_as_it_must_be_gets_as_far_as_the_gpu(op: str) -> None:
    call, make = CALLS[op]
    with pytest.raises((ValueError, AssertionError, RuntimeError), match=r"(?i)cuda") as caught:
        call(**make())
    assert not isinstance(caught.value, KernelError)


@pytest.mark.parametrize(("op", "name", "spoil"), SPOILED)
def test_memory_that_a_kernel_would_read_wrongly_is_refused_by_name(
    op: str, name: str, spoil: Callable[[Tensor], Tensor]
) -> None:
    call, make = CALLS[op]
    arguments = make()
    arguments[name] = spoil(arguments[name])
    with pytest.raises(KernelError, match=rf"^{op}: '{name}' must "):
        call(**arguments)


def test_heads_of_a_query_may_stand_in_wider_rows() -> None:
    call, make = CALLS["split_rope_write"]
    arguments = make()
    arguments["query"] = arguments["qkv"][:, :2048].view(ROWS, 8, 256)
    with pytest.raises((ValueError, AssertionError, RuntimeError), match=r"(?i)cuda"):
        call(**arguments)
    arguments["query"] = bf16(ROWS, 256, 8).transpose(1, 2)
    with pytest.raises(KernelError, match="split_rope_write: 'query' must be bfloat16 with contiguous rows"):
        call(**arguments)


def test_a_branch_without_its_gate_is_refused() -> None:
    call, make = CALLS["gated_residual_ada_rms_norm"]
    for missing, left in (("gate", "branch"), ("branch", "gate")):
        with pytest.raises(KernelError, match=f"come together, got only '{left}'"):
            call(**{**make(), missing: None})


@pytest.mark.parametrize("spoil", [expanded, part_of_wider_rows, every_other, shifted])
def test_made_dense_is_what_kernels_take_and_copies_only_if_it_must(spoil: Callable[[Tensor], Tensor]) -> None:
    tensor = torch.randn(ROWS, 128)
    spoiled = spoil(tensor)
    with pytest.raises(KernelError):
        demand_dense("op", torch.float32, x=spoiled)
    made = made_dense(spoiled)
    demand_dense("op", torch.float32, x=made)
    assert torch.equal(made, spoiled)
    assert made_dense(tensor) is tensor


def test_a_tensor_elsewhere_is_no_address_for_a_kernel() -> None:
    x, gpu = torch.ones(4), torch.device("cuda", 1)
    with pytest.raises(KernelError, match="norm: argument 2 is on 'cpu', the kernel runs on 'cuda:1'; move it there"):
        converted(x, "norm: argument 2", gpu)
    assert converted(x, "norm: argument 2", torch.device("cpu")) == x.data_ptr()
    demand_device("x", x.to("meta"), torch.device("meta"))


@pytest.mark.parametrize(
    ("width", "warps"), [(128, 1), (256, 1), (640, 1), (1024, 4), (1152, 3), (1536, 6), (2048, 8), (4096, 8)]
)
def test_a_row_of_a_norm_is_shared_evenly(width: int, warps: int) -> None:
    assert kernels.row_warps(width) == warps
