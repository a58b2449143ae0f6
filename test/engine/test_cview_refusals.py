"""What C code may not do is refused with a number and a sentence, and the session goes on as if it had not asked."""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from ctypes import c_int32, c_uint8, c_uint32, c_uint64, c_void_p

import numpy as np
import pytest
import torch

from flashrt_ros.contract import Variant
from flashrt_ros.engine import BusyError, ClosedError, CView, Session
from flashrt_ros.engine.cabi import ABI_VERSION, CALLBACKS, ContractView, Status

from ..contract.builders import make_contract
from .c_client import Client, Driver
from .toy import BODIES, image, make_session

IMAGE, NOISE = 0, 2  # their places among the buffers of the toy
BYTE = (c_uint8 * 1)()
CALLS: Mapping[str, Callable[[Driver], Status]] = {
    "begin_fill": lambda driver: driver.call("begin_fill", IMAGE, c_void_p()),
    "filled": lambda driver: driver.call("filled", IMAGE, 1),
    "draw": lambda driver: driver.call("draw", NOISE),
    "act": lambda driver: driver.call("act"),
    "read": lambda driver: driver.call("read", IMAGE, 0, 1, BYTE),
    "version_of": lambda driver: driver.call("version_of", IMAGE, c_uint64()),
    "live_rows": lambda driver: driver.call("live_rows", 0, c_uint64()),
}
DRIVING = ("begin_fill", "draw", "act", "read")  # the calls that nobody may make while another drives
Tensors = Mapping[str, torch.Tensor]


@pytest.fixture
def unmoved(driver: Driver) -> Iterator[None]:
    """Fails the test unless versions, counts and actions are afterwards what they were before."""
    session = driver.session
    before = (session.versions, dict(session.counts), session.read("actions").tobytes())
    yield
    assert (session.versions, dict(session.counts), session.read("actions").tobytes()) == before


# --- The check before anything else


def test_only_the_own_version_and_a_structure_that_is_large_enough_are_accepted(driver: Driver) -> None:
    copy = ContractView.from_buffer_copy(ContractView.from_address(driver.view.address))
    address, size = ctypes.addressof(copy), ctypes.sizeof(ContractView)
    for version in (0, ABI_VERSION + 1, 2**32 - 1):
        assert driver.client.call("check", address, version) is Status.WRONG_ABI
        copy.abi_version = version
        assert driver.client.call("check", address, ABI_VERSION) is Status.WRONG_ABI
        assert driver.client.call("check", address, version) is Status.WRONG_ABI
        copy.abi_version = ABI_VERSION
    for smaller in (0, size - 1):
        copy.struct_size = smaller
        assert driver.client.call("check", address, ABI_VERSION) is Status.TOO_SMALL
    copy.struct_size = size + 8  # a host of the same version that has learned more
    assert driver.client.call("check", address, ABI_VERSION) is Status.OK


# --- Wrong arguments


@pytest.mark.usefixtures("unmoved")
def test_unknown_names_and_numbers(driver: Driver) -> None:
    assert driver.call("find_buffer", b"imag", c_uint32()) is Status.UNKNOWN_BUFFER
    assert driver.call("find_region", b"image", c_uint32()) is Status.UNKNOWN_REGION
    for index in (8, 2**32 - 1):
        assert driver.call("begin_fill", index, c_void_p()) is Status.UNKNOWN_BUFFER
        assert driver.call("filled", index, 1) is Status.UNKNOWN_BUFFER
        assert driver.call("draw", index) is Status.UNKNOWN_BUFFER
        assert driver.call("read", index, 0, 1, BYTE) is Status.UNKNOWN_BUFFER
        assert driver.call("version_of", index, c_uint64()) is Status.UNKNOWN_BUFFER
        assert f"buffer {index} was asked for; there are 8" in driver.message()
        assert driver.call("live_rows", index, c_uint64()) is Status.UNKNOWN_REGION
        assert f"region {index} was asked for; there are 2" in driver.message()


@pytest.mark.usefixtures("unmoved")
def test_null_instead_of_a_contract(driver: Driver) -> None:
    text = ctypes.create_string_buffer(8)
    calls: dict[str, tuple[object, ...]] = {
        "check": (ABI_VERSION,),
        "find_buffer": (b"image", c_uint32()),
        "find_region": (b"kv", c_uint32()),
        "begin_fill": (IMAGE, c_void_p()),
        "filled": (IMAGE, 1),
        "draw": (NOISE,),
        "act": (),
        "read": (IMAGE, 0, 1, BYTE),
        "version_of": (IMAGE, c_uint64()),
        "live_rows": (0, c_uint64()),
        "last_error": (text, 8),
    }
    assert calls.keys() >= CALLBACKS.keys()
    for name, arguments in calls.items():
        assert driver.client.call(name, None, *arguments) is Status.BAD_ARGUMENT, name


@pytest.mark.usefixtures("unmoved")
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("find_buffer", (None, c_uint32())),
        ("find_buffer", (b"image", None)),
        ("find_region", (None, c_uint32())),
        ("find_region", (b"kv", None)),
        ("begin_fill", (IMAGE, None)),
        ("read", (IMAGE, 0, 1, None)),
        ("version_of", (IMAGE, None)),
        ("live_rows", (0, None)),
        ("last_error", (None, 8)),
        ("last_error", (ctypes.create_string_buffer(8), 0)),
    ],
)
def test_null_instead_of_a_place_for_the_answer(driver: Driver, name: str, arguments: tuple[object, ...]) -> None:
    assert driver.call(name, *arguments) is Status.BAD_ARGUMENT
    if name in CALLBACKS:
        assert "is NULL or has no room" in driver.message()


@pytest.mark.usefixtures("unmoved")
@pytest.mark.parametrize("name", [*CALLS, "last_error"])
def test_a_callback_wants_its_own_context_and_a_place_for_the_status(driver: Driver, name: str) -> None:
    callback = getattr(ContractView.from_address(driver.view.address), name)
    rest = [kind(0) if kind in (c_uint32, c_uint64) else None for kind in CALLBACKS[name]._argtypes_[1:-1]]
    for context in (None, driver.view.address + 8, Driver(driver.client, driver.session).view.address):
        status = c_int32(Status.INTERRUPTED)
        callback(context, *rest, status)
        assert status.value == Status.BAD_ARGUMENT
    assert "pass contract->context" in driver.message()
    callback(driver.view.address, *rest, None)  # nobody to tell, so nothing is done


@pytest.mark.usefixtures("unmoved")
@pytest.mark.parametrize("buffer", ["table", "prompt", "kv", "hidden", "actions"])
def test_only_windows_that_the_host_fills_are_lent(driver: Driver, buffer: str) -> None:
    assert driver.begin_fill(buffer) == (Status.NOT_A_WINDOW, None)
    assert f"'{buffer}' is a" in driver.message()
    assert driver.filled(buffer, 1) is Status.NOT_BEGUN
    assert driver.call("draw", driver.index(buffer)) is Status.NOT_A_WINDOW


@pytest.mark.usefixtures("unmoved")
def test_noise_is_drawn_into_float_windows_only(driver: Driver) -> None:
    assert driver.call("draw", driver.index("tokens")) is Status.DOES_NOT_FIT


@pytest.mark.usefixtures("unmoved")
@pytest.mark.parametrize(
    ("offset", "nbytes"), [(0, 0), (0, 193), (192, 1), (191, 2), (2**64 - 1, 1), (1, 2**64 - 1), (8, 2**64 - 8)]
)
def test_bytes_outside_a_buffer_are_not_read(driver: Driver, offset: int, nbytes: int) -> None:
    target = (c_uint8 * 256)()
    assert driver.call("read", driver.index("kv"), offset, nbytes, target) is Status.OUT_OF_RANGE
    assert bytes(target) == bytes(256)
    assert "of 'kv' were asked for, it has 192" in driver.message()


# --- Wrong moments


@pytest.mark.usefixtures("unmoved")
def test_a_window_that_was_not_lent_is_not_taken_back(driver: Driver) -> None:
    assert driver.filled("image", 8) is Status.NOT_BEGUN
    assert "'image' was not lent" in driver.message()


def test_a_window_can_be_given_back_once_and_as_the_one_that_was_lent(driver: Driver) -> None:
    assert driver.begin_fill("image")[0] is Status.OK
    assert driver.filled("tokens", 4) is Status.NOT_BEGUN
    assert driver.filled("image", 8) is Status.OK
    assert driver.filled("image", 8) is Status.NOT_BEGUN


@pytest.mark.parametrize("rows", [0, 9, 2**64 - 1])
def test_rows_that_the_window_does_not_have_leave_it_lent(driver: Driver, rows: int) -> None:
    version = driver.version("image")
    assert driver.begin_fill("image")[0] is Status.OK
    assert driver.filled("image", rows) is Status.DOES_NOT_FIT
    assert f"window 'image' has 8 rows, cannot fill {rows}" in driver.message()
    assert driver.version("image") == version
    assert driver.filled("image", 8) is Status.OK
    assert driver.version("image") == version + 1


def test_nobody_drives_while_a_window_is_lent_so_no_byte_changes_unnoticed(driver: Driver) -> None:
    session, version = driver.session, driver.version("image")
    status, address = driver.begin_fill("image")
    assert status is Status.OK
    assert address == session.host_address("image")
    ctypes.memset(c_void_p(address), 50, 8)
    for name in DRIVING:
        assert CALLS[name](driver) is Status.BUSY, name
    drives = (session.act, session.draw, session.close, lambda: session.snapshot("x"), lambda: session.read("kv"))
    for refused in drives:
        with pytest.raises(BusyError, match="being driven already"):
            refused()
    assert driver.version("image") == version
    assert driver.filled("image", 8) is Status.OK
    assert driver.version("image") == version + 1
    assert session.act() == ("context", "action")


def test_nobody_drives_while_a_buffer_is_being_read(driver: Driver) -> None:
    with driver.session.reading("kv") as kv:
        assert kv.data_ptr() == driver.session.arena.address("kv")
        assert driver.act() is Status.BUSY
    assert driver.act() is Status.OK


def test_a_second_thread_is_told_that_the_session_is_busy(client: Client) -> None:
    inside, leave = threading.Event(), threading.Event()

    def slow(buffers: Tensors, variant: Variant) -> None:
        inside.set()
        assert leave.wait(10)

    leave.set()
    driver = Driver(client, make_session(bodies={**BODIES, "action": slow}))
    inside.clear()
    leave.clear()
    statuses: list[Status] = []
    thread = threading.Thread(target=lambda: statuses.append(driver.act()))
    thread.start()
    assert inside.wait(10)
    try:
        for name in DRIVING:
            assert CALLS[name](driver) is Status.BUSY, name
        assert driver.version("image") == 1
    finally:
        leave.set()
        thread.join()
    assert statuses == [Status.OK]


def test_what_is_stale_is_not_read(driver: Driver) -> None:
    driver.fill("image", image(3))
    for buffer in ("kv", "actions"):
        assert driver.read(buffer, 0, 16) == (Status.STALE, bytes(16))
    assert "reading 'actions' would use stale data" in driver.message()
    assert driver.session.stale_refusals == 2


def test_before_configure_and_before_the_windows_are_filled(client: Client) -> None:
    driver = Driver(client, Session(make_contract(), BODIES))
    assert driver.act() is Status.NOT_CONFIGURED
    driver.session.configure()
    assert driver.act() is Status.UNFILLED


# --- What breaks off


def failing(error: BaseException) -> tuple[Session, list[BaseException]]:
    """A session whose context stage raises what is in the list."""
    errors: list[BaseException] = []

    def context(buffers: Tensors, variant: Variant) -> None:
        BODIES["context"](buffers, variant)
        if errors:
            raise errors[0]

    session = make_session(bodies={**BODIES, "context": context})
    session.act()
    errors.append(error)
    return session, errors


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("the device is gone"), Status.FAILED),
        (MemoryError(), Status.FAILED),
        (RecursionError(), Status.FAILED),
        (KeyboardInterrupt(), Status.INTERRUPTED),
        (SystemExit(3), Status.INTERRUPTED),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whatever_a_stage_raises_becomes_a_status(client: Client, error: BaseException, status: Status) -> None:
    session, errors = failing(error)
    driver = Driver(client, session)
    assert driver.decide(image(6))[0] is status
    assert driver.message() == (str(error) or type(error).__name__)
    assert driver.read("actions", 0, 16)[0] is Status.STALE
    errors.clear()
    assert driver.act() is Status.OK
    assert session.counts["context"] == 2


def test_a_message_is_cut_between_characters(client: Client) -> None:
    driver = Driver(client, failing(RuntimeError("größer"))[0])
    assert driver.decide(image(6))[0] is Status.FAILED
    assert [driver.message(size) for size in (1, 3, 4, 5, 9)] == ["", "gr", "gr", "grö", "größer"]


def test_ctrl_c_while_c_code_runs_is_an_answer_too(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[type[BaseException] | None] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda problem: seen.append(problem.exc_type))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        driver.fill("image", image(9))
        assert driver.call("act_after_ctrl_c") is Status.INTERRUPTED
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [KeyboardInterrupt]  # Python broke off before the first line of the callback
    assert driver.act() is Status.OK
    np.testing.assert_array_equal(driver.session.read("image"), image(9))


# --- After a close


@pytest.mark.parametrize("close", [lambda d: d.session.close(), lambda d: d.view.close()], ids=["session", "view"])
def test_after_a_close_every_callback_says_so_and_the_plan_can_still_be_read(
    driver: Driver, close: Callable[[Driver], None]
) -> None:
    plan = driver.client.describe(driver.view.address)
    close(driver)
    close(driver)
    assert CALLS.keys() | {"last_error"} == CALLBACKS.keys()
    for name, call in CALLS.items():
        assert call(driver) is Status.CLOSED, name
    assert "was closed" in driver.message()
    assert driver.client.describe(driver.view.address) == plan


def test_a_view_that_is_closed_takes_back_what_it_lent_and_the_session_goes_on(client: Client) -> None:
    session = make_session()
    session.act()
    version = session.versions["image"]
    with CView(session) as view:
        assert client.call("begin_fill", view.address, IMAGE, c_void_p()) is Status.OK
    assert client.call("filled", view.address, IMAGE, 8) is Status.CLOSED
    assert session.versions["image"] == version + 1  # nobody knows what was written to it
    session.fill("image", image(2))
    assert session.act() == ("context", "action")


def test_a_closed_session_has_no_view() -> None:
    session = make_session()
    session.close()
    with pytest.raises(ClosedError):
        CView(session)
