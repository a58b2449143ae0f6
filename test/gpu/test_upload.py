"""Uploads through pinned blocks: equal bytes, whatever the size, and no block that is filled too early."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from flashrt_ros.engine.upload import Uploader

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("shape", [(1,), (1000,), (1024,), (1025,), (64, 1024), (3, 5, 7)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_tensor_arrives_as_it_is(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    upload, tensor = Uploader(DEVICE, block=2048), torch.randn(shape).to(dtype)
    copy = upload(tensor)
    assert (copy.device, copy.dtype, copy.is_contiguous()) == (DEVICE, dtype, True)
    assert torch.equal(copy.cpu(), tensor)


def test_many_tensors_in_a_row_keep_apart(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((1 << 20,), i, dtype=torch.float32) for i in range(24)}
    save_file(tensors, tmp_path / "t.safetensors")
    upload, stream = Uploader(DEVICE, block=1 << 20), torch.cuda.Stream(DEVICE)  # type: ignore[no-untyped-call]
    with safe_open(tmp_path / "t.safetensors", framework="pt") as file, torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]  # the GPU falls behind, so that every block would be filled again too early
        copies = {name: upload(file.get_tensor(name)) for name in tensors}
    stream.synchronize()
    assert all(torch.equal(copies[name].cpu(), tensors[name]) for name in tensors)


def test_a_transposed_tensor_arrives_in_the_order_of_its_values() -> None:
    tensor = torch.randn(300, 200).t()
    assert torch.equal(Uploader(DEVICE, block=4096)(tensor).cpu(), tensor)
