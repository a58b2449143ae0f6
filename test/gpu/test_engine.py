"""The engine on a real GPU: graphs, windows and capsules behave as on a CPU."""

from __future__ import annotations

import gc
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from flashrt_ros.contract import Variant
from flashrt_ros.engine import (
    Arena,
    CapsuleFolder,
    CapsuleStore,
    Session,
    SessionManager,
    StageBody,
    StaleInputError,
    recording_into,
)
from flashrt_ros.engine.copier import copy_with_torch
from flashrt_ros.engine.graphs import GraphSet, capture
from flashrt_ros.ops.region_copy import region_copy

from ..contract.builders import make_contract
from ..engine.segments import random_segments
from ..engine.toy import BODIES, expected, image, tokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def make_session(device_bytes: int = 1 << 20, seed: int = 0) -> Session:
    store = CapsuleStore(torch.device("cuda"), device_bytes, 1 << 20)
    session = Session(make_contract(), BODIES, "cuda", seed, store, region_copy("cuda"))
    session.configure()
    session.fill("image", image(1))
    session.fill("tokens", tokens(5, 6, 7, 8))
    session.draw()
    session.set_extent("rows", 4)
    session.act()
    return session


def continuation(session: Session, steps: int = 3) -> bytes:
    bits = b""
    for step in range(steps):
        session.fill("image", image(20 + step))
        session.draw()
        session.act()
        bits += session.read("actions").tobytes()
    return bits


def test_graphs_compute_what_the_host_computes() -> None:
    session = make_session()
    noise = session.read("noise")
    np.testing.assert_allclose(session.read("actions"), expected(image(1), tokens(5, 6, 7, 8), noise), rtol=1e-6)
    session.fill("image", image(2))
    with pytest.raises(StaleInputError):
        session.replay("action")


def test_noise_is_the_same_on_every_device() -> None:
    on_cpu = Session(make_contract(), BODIES, "cpu", seed=3)
    on_cpu.draw()
    np.testing.assert_array_equal(make_session(seed=3).read("noise"), on_cpu.read("noise"))


@pytest.mark.parametrize("device_bytes", [1 << 20, 0])  # the GPU tier, then the pinned host tier
def test_a_restored_continuation_has_equal_bits(device_bytes: int) -> None:
    session = make_session(device_bytes)
    session.snapshot("here")
    uninterrupted = continuation(session)
    session.fill("tokens", tokens(9, 9, 9, 9))
    continuation(session)
    session.restore("here")
    session.fill("tokens", tokens(5, 6, 7, 8))
    assert continuation(session) == uninterrupted


def test_a_file_restores_on_a_gpu(tmp_path: Path) -> None:
    session = make_session()
    folder = CapsuleFolder(tmp_path)
    folder.save(session.snapshot("here"))
    uninterrupted = continuation(session)
    other = make_session(seed=9)
    other.capsules.insert(folder.load("here"))
    other.restore("here")
    assert continuation(other) == uninterrupted


def test_sessions_share_one_working_set() -> None:
    manager = SessionManager(make_session())
    manager.open("a")
    bits = {"main": b"", "a": b""}
    for _ in range(3):
        for name in bits:
            with manager.use(name) as session:
                bits[name] += continuation(session, 1)
    alone = make_session()
    assert bits["main"] == bits["a"] == b"".join(continuation(alone, 1) for _ in range(3))


@pytest.mark.parametrize("seed", range(20))
def test_the_copy_kernel_equals_its_reference(seed: int) -> None:
    from flashrt_ros.ops.cuda.capsule import CapsuleCopy

    device = torch.device("cuda", 0)
    copy = CapsuleCopy(device)
    segments, arena_bytes, packed_bytes = random_segments(seed, most=6 if seed else 90)  # 90: more than one launch
    arena = torch.randint(0, 256, (arena_bytes,), dtype=torch.uint8, device=device)
    for gather in (True, False):
        results = []
        for function in (copy, copy_with_torch):
            inside, packed = arena.clone(), torch.full((packed_bytes,), 7, dtype=torch.uint8, device=device)
            if not gather:
                packed = torch.arange(packed_bytes, device=device).remainder(251).to(torch.uint8)
            function(inside, segments)(packed, gather)
            results.append((inside, packed))
        torch.cuda.synchronize()
        assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def test_a_file_of_the_host_tier_waits_for_its_bytes(tmp_path: Path) -> None:
    session = make_session(device_bytes=0)
    folder = CapsuleFolder(tmp_path)
    for value in range(20):  # saved at once, while the copy to the host is under way
        session.fill("tokens", tokens(value, value, value, value))
        session.draw()
        session.act()
        torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
        folder.save(session.snapshot("here", replace=True))
        torch.cuda.synchronize()
        assert folder.load("here").block.equal(session.capsules.get("here").block)


def test_a_snapshot_is_of_its_moment_though_the_device_is_behind() -> None:
    session = make_session()
    torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
    session.snapshot("early")
    session.fill("image", image(99))
    session.act()
    later = session.read("kv")
    session.restore("early")
    session.act()
    assert not np.array_equal(session.read("kv"), later)
    np.testing.assert_array_equal(session.read("kv")[:, :4], make_session().read("kv")[:, :4])


def test_a_thread_that_never_used_the_device_can_restore() -> None:
    session = make_session()
    session.snapshot("here")
    saved = session.read("kv")
    session.fill("image", image(99))
    session.act()
    thread = threading.Thread(target=session.restore, args=("here",))
    thread.start()
    thread.join()
    session.act()
    np.testing.assert_array_equal(session.read("kv")[:, :4], saved[:, :4])


def test_a_block_that_is_not_aligned_is_refused() -> None:
    from flashrt_ros.ops.cuda.capsule import CapsuleCopy
    from flashrt_ros.ops.cuda.errors import KernelError

    segments, arena_bytes, packed_bytes = random_segments(1)
    arena, packed = (torch.zeros(n, dtype=torch.uint8, device="cuda") for n in (arena_bytes, packed_bytes + 1))
    with pytest.raises(KernelError, match="aligned to 16 bytes"):
        CapsuleCopy(torch.device("cuda", 0))(arena, segments)(packed[1:], True)


def test_a_graph_keeps_the_weights_that_only_its_body_holds() -> None:
    def adding() -> StageBody:
        weights = torch.arange(1 << 22, dtype=torch.float32, device="cuda")  # of a size that is a block of its own

        def body(buffers: Mapping[str, torch.Tensor], variant: Variant) -> None:
            torch.add(weights, 1, out=buffers["out"])

        return body

    arena = {"out": torch.zeros(1 << 22, device="cuda")}
    graph = capture(adding(), arena, Variant("only", {}), torch.device("cuda"))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    others = [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(8)]
    graph.replay()
    assert torch.equal(arena["out"].cpu(), torch.arange(1, (1 << 22) + 1, dtype=torch.float32))
    assert len(others) == 8


def test_a_graph_that_becomes_garbage_does_not_end_a_capture() -> None:
    """The garbage collector runs when it likes; destroying a graph waits for the device, which a capture forbids."""
    x = torch.zeros(8, device="cuda")

    def graph_in_a_cycle() -> None:
        dead = torch.cuda.CUDAGraph()
        with recording_into(dead):
            x.add_(1)
        holder: list[object] = [dead]
        holder.append(holder)

    gc.collect()
    graph = torch.cuda.CUDAGraph()
    gc.disable()
    graph_in_a_cycle()
    gc.enable()
    with recording_into(graph):
        made = [[index] for index in range(10 * gc.get_threshold()[0])]  # enough for the collector to want to run
        x.add_(len(made))
    graph.replay()
    assert x.tolist() == [float(len(made))] * 8
    assert gc.isenabled()


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def test_float32_products_are_exact_in_stages_and_as_the_process_says_elsewhere() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    x, y = (torch.randn(512, 512, device="cuda", generator=generator) for _ in range(2))
    out, contract = torch.empty(512, 512, device="cuda"), make_contract()

    def body(arena: Mapping[str, torch.Tensor], variant: Variant) -> None:
        torch.mm(x, y, out=out)

    stage, variant, device = contract.order[0].name, contract.variants[0], torch.device("cuda")
    bodies: dict[str, StageBody] = {**BODIES, stage: body}
    arena = Arena(contract, device)
    exact = x.double() @ y.double()
    torch.set_float32_matmul_precision("high")
    try:
        stages = GraphSet(contract, bodies, arena, device)
        alone = capture(body, arena, variant, device)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    stages.replay(stage, variant.name)
    assert relative_error(out, exact) < 1e-5
    if torch.cuda.get_device_capability() >= (8, 0):  # the first that can round to TF32
        alone.replay()
        assert relative_error(out, exact) > 1e-4
