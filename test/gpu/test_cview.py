"""C code drives a session on a GPU: uploads, the stream and freshness behave as on a CPU."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from flashrt_ros.contract import Region
from flashrt_ros.engine import Session
from flashrt_ros.engine.cabi import DEVICE_CODES, ContractView, Status

from ..contract.builders import REGIONS, make_contract
from ..engine.c_client import SOURCE, Client, Driver
from ..engine.c_compiler import compile_library
from ..engine.toy import BODIES, image, tokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
A_WHILE = 400_000_000  # cycles of the GPU's clock: some tenths of a second


class Delay:
    """Keeps the default stream busy for a while."""

    def __init__(self) -> None:
        self._end = torch.cuda.Event()  # type: ignore[no-untyped-call]
        torch.cuda._sleep(A_WHILE)  # type: ignore[no-untyped-call]
        self._end.record()

    def is_over(self) -> bool:
        return bool(self._end.query())  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Client:
    return Client(compile_library(tmp_path_factory.mktemp("client"), SOURCE, "c11"))


def make_session(*more_regions: Region) -> Session:
    session = Session(make_contract(regions=(*REGIONS, *more_regions)), BODIES, "cuda")
    session.configure()
    session.fill("image", image(1))
    session.fill("tokens", tokens(5, 6, 7, 8))
    session.draw()
    session.act()
    return session


@pytest.mark.parametrize("function", ["decide", "decide_in_a_thread"])
def test_a_c_program_decides_as_python_does(client: Client, function: str) -> None:
    ours, driver = make_session(), Driver(client, make_session())
    for value in range(2, 40):
        ours.fill("image", image(value))
        ours.act()
        status, actions = driver.decide(image(value), function)
        assert status is Status.OK, driver.message()
        assert actions.tobytes() == ours.read("actions").tobytes()
    assert driver.session.versions == ours.versions
    for buffer in ours.contract.buffers:
        assert driver.read_all(buffer.name) == ours.read(buffer.name).tobytes()


def test_the_view_tells_the_device_from_the_host(client: Client) -> None:
    driver = Driver(client, make_session())
    view = ContractView.from_address(driver.view.address)
    assert (view.device_type, view.device_index) == (DEVICE_CODES["cuda"], torch.cuda.current_device())
    for i, buffer in enumerate(driver.session.contract.buffers):
        seen = view.buffers[i]
        assert seen.device_address == driver.session.arena.address(buffer.name)
        assert seen.device_address != seen.host_address
    assert driver.begin_fill("image") == (Status.OK, view.buffers[0].host_address)


def test_a_window_is_lent_only_after_its_last_upload_has_left(client: Client) -> None:
    driver, delay = Driver(client, make_session()), Delay()
    assert driver.fill("image", image(2)) is Status.OK
    assert driver.act() is Status.OK
    assert not delay.is_over(), "the GPU was too fast for this test; raise A_WHILE"
    status, address = driver.begin_fill("image")
    assert status is Status.OK
    assert delay.is_over()
    ctypes.memset(ctypes.c_void_p(address), 77, 8)  # after the copy of the 2s, so they are what was acted on
    kept = driver.session.arena["kv"].cpu()
    assert driver.filled("image", 8) is Status.OK
    assert driver.read("actions", 0, 16)[0] is Status.STALE
    expected = make_session()
    expected.fill("image", image(2))
    expected.act()
    np.testing.assert_array_equal(kept.numpy(), expected.read("kv"))


def test_work_goes_to_the_stream_of_the_view_from_any_thread(client: Client) -> None:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        session = make_session()
        driver = Driver(client, session)
    assert ContractView.from_address(driver.view.address).stream == stream.cuda_stream
    stream.synchronize()
    delay = Delay()  # on the default stream, which nothing here waits for
    assert driver.decide(image(5), "decide_in_a_thread")[0] is Status.OK
    assert not delay.is_over()
    torch.cuda.synchronize()


def test_a_part_that_is_filled_after_a_restore_leaves_the_rest_as_it_was_restored(client: Client) -> None:
    driver = Driver(client, make_session(Region("image", "image", 0, 8)))
    driver.session.snapshot("before")
    driver.fill("image", image(9))
    driver.session.restore("before")
    status, address = driver.begin_fill("image")
    assert status is Status.OK
    assert bytes((ctypes.c_uint8 * 8).from_address(address or 0)) == bytes([1] * 8)
    ctypes.memset(ctypes.c_void_p(address), 200, 3)
    assert driver.filled("image", 3) is Status.OK
    assert driver.read_all("image") == bytes([200] * 3 + [1] * 5)
