"""C code in this process fills windows, acts and reads, and gets what Python gets."""

from __future__ import annotations

import ctypes
import gc
import tracemalloc
import weakref
from ctypes import c_uint32, c_uint64

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashrt_ros.contract import Buffer, DType, Role
from flashrt_ros.engine import Session
from flashrt_ros.engine.cabi import (
    CAPSULE_NAME,
    DEVICE_CODES,
    DTYPE_CODES,
    RATE_CODES,
    ROLE_CODES,
    ContractView,
    Status,
)

from ..contract.builders import BUFFERS, make_contract, replaced
from .c_client import Client, Driver
from .toy import BODIES, expected, image, make_session, tokens

RATES = {"image": "OBSERVATION", "tokens": "PROMPT", "noise": "OBSERVATION", "table": "CHECKPOINT", "prompt": "PROMPT"}
RATES |= {"kv": "OBSERVATION", "hidden": "STEP", "actions": "STEP"}


# --- Driving


@pytest.mark.parametrize("function", ["decide", "decide_in_a_thread"])
def test_a_c_program_decides_as_python_does(client: Client, function: str) -> None:
    ours, theirs = make_session(seed=4), make_session(seed=4)
    driver = Driver(client, theirs)
    for value in (7, 8, 8):
        ours.fill("image", image(value))
        replayed = ours.act()
        status, actions = driver.decide(image(value), function)
        assert status is Status.OK, driver.message()
        np.testing.assert_array_equal(actions, ours.read("actions"))
        np.testing.assert_array_equal(actions, expected(image(value), tokens(5, 6, 7, 8), ours.read("noise")))
        assert "context" in replayed
    assert theirs.versions == ours.versions
    assert theirs.counts == ours.counts


def test_a_window_that_was_filled_in_place_makes_its_readers_stale_and_no_others(driver: Driver) -> None:
    before = dict(driver.session.counts)
    assert driver.fill("image", image(9)) is Status.OK
    assert driver.session.is_stale("context")
    assert driver.act() is Status.OK
    replayed = {name: count - before[name] for name, count in driver.session.counts.items()}
    assert replayed == {"tables": 0, "prompt": 0, "context": 1, "action": 1}


def test_equal_bytes_are_still_a_new_observation(driver: Driver) -> None:
    version = driver.version("image")
    assert driver.fill("image", image(1)) is Status.OK
    assert driver.version("image") == version + 1
    assert driver.session.act() == ("context", "action")


def test_a_fill_may_end_after_the_rows_that_were_written(driver: Driver) -> None:
    assert driver.fill("image", np.full(3, 200, np.uint8)) is Status.OK
    assert driver.read_all("image") == bytes([200, 200, 200, 1, 1, 1, 1, 1])


def test_python_and_c_fill_the_same_window_in_turn(driver: Driver) -> None:
    driver.session.fill("tokens", tokens(1, 2, 3, 4))
    assert driver.read_all("tokens") == tokens(1, 2, 3, 4).tobytes()
    assert driver.fill("tokens", tokens(4, 3, 2, 1)) is Status.OK
    np.testing.assert_array_equal(driver.session.read("tokens"), [4, 3, 2, 1])


def test_c_draws_the_noise_that_python_would_draw(client: Client) -> None:
    ours, driver = make_session(seed=11), Driver(client, make_session(seed=11))
    for _ in range(3):
        ours.draw()
        assert driver.call("draw", driver.index("noise")) is Status.OK
        assert driver.read_all("noise") == ours.read("noise").tobytes()


def test_any_part_of_any_buffer_can_be_read(driver: Driver) -> None:
    raw = driver.session.read("kv").tobytes()
    assert driver.read("kv", 0, len(raw)) == (Status.OK, raw)
    assert driver.read("kv", 5, 11) == (Status.OK, raw[5:16])
    assert driver.read("kv", len(raw) - 1, 1) == (Status.OK, raw[-1:])


@pytest.mark.parametrize("rows", [0, 1, 4, 6])
def test_the_live_rows_of_a_region_are_found(driver: Driver, rows: int) -> None:
    driver.session.set_extent("rows", rows)
    target, count = (ctypes.c_uint8 * 192)(), c_uint64(99)
    assert driver.call("read_live", b"kv", target, count) is Status.OK
    live = driver.session.read("kv")[:, :rows].tobytes()
    assert (count.value, bytes(target)[: len(live)]) == (len(live), live)


def test_a_region_without_an_extent_is_live_as_a_whole(driver: Driver) -> None:
    target, count = (ctypes.c_uint8 * 16)(), c_uint64()
    assert driver.call("read_live", b"prompt", target, count) is Status.OK
    assert bytes(target) == driver.session.read("prompt").tobytes()


def test_after_a_restore_c_must_show_a_new_image_as_python_must(driver: Driver) -> None:
    driver.session.snapshot("before")
    driver.fill("image", image(9))
    driver.session.restore("before")
    assert driver.act() is Status.OK  # what was saved is fresh, so nothing reads the image
    driver.fill("tokens", tokens(1, 2, 3, 4))
    assert driver.act() is Status.UNFILLED
    assert "image" in driver.message()
    driver.fill("image", image(2))
    assert driver.act() is Status.OK
    noise = driver.session.read("noise")
    assert driver.read_all("actions") == expected(image(2), tokens(1, 2, 3, 4), noise).tobytes()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("image"), st.integers(0, 255), st.integers(1, 8)),
        st.tuples(st.just("tokens"), st.integers(-9, 9), st.integers(1, 4)),
        st.sampled_from([("draw", 0, 0), ("act", 0, 0), ("long", 0, 0), ("short", 0, 0)]),
    ),
    max_size=20,
)


def in_python(session: Session, what: str, value: int, rows: int) -> None:
    if what in ("long", "short"):
        session.select(what)
    elif what in ("draw", "act"):
        getattr(session, what)()
    else:
        with session.window(what, rows) as window:
            window[:] = value


def in_c(driver: Driver, what: str, value: int, rows: int) -> None:
    if what in ("long", "short"):
        driver.session.select(what)
    elif what == "act":
        assert driver.act() is Status.OK
    elif what == "draw":
        assert driver.call("draw", driver.index("noise")) is Status.OK
    else:
        dtype = np.uint8 if what == "image" else np.int32
        assert driver.fill(what, np.full(rows, value, dtype)) is Status.OK


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_any_sequence_from_c_equals_the_same_from_python(client: Client, steps: list[tuple[str, int, int]]) -> None:
    ours, driver = make_session(seed=2), Driver(client, make_session(seed=2))
    for step in steps:
        in_python(ours, *step)
        in_c(driver, *step)
        assert driver.session.versions == ours.versions
        assert driver.session.counts == ours.counts
    ours.act()
    assert driver.act() is Status.OK
    for buffer in ours.contract.buffers:
        assert driver.read_all(buffer.name) == ours.read(buffer.name).tobytes()


# --- The plan


def test_the_client_sees_the_whole_plan(driver: Driver) -> None:
    contract = driver.session.contract
    lines = driver.client.describe(driver.view.address)
    assert lines[0] == f"contract toy {contract.fingerprint} device {DEVICE_CODES['cpu']} 0"
    rates = {rate.name: code for rate, code in RATE_CODES.items()}
    for line, buffer in zip(lines[1:9], contract.buffers, strict=True):
        assert line == (
            f"buffer {buffer.name} role {ROLE_CODES[buffer.role]} rate {rates[RATES[buffer.name]]} "
            f"dtype {DTYPE_CODES[buffer.dtype]} host {buffer.rate is not None:d} bytes {buffer.nbytes} "
            f"shape {' '.join(map(str, buffer.shape))}"
        )
    assert lines[9:] == [
        "stage tables rate 0 reads writes table",
        "stage prompt rate 1 reads tokens writes prompt",
        "stage context rate 2 reads image prompt writes kv",
        "stage action rate 3 reads kv noise table writes hidden actions",
        "region kv of kv at 0 bytes 192 blocks 2 rows 6 of 16 live rows",
        "region prompt of prompt at 0 bytes 16 blocks 1 rows 1 of 16 live -",
    ]


def test_addresses_are_those_of_the_arena_and_of_the_windows(driver: Driver) -> None:
    view = ContractView.from_address(driver.view.address)
    for i, buffer in enumerate(driver.session.contract.buffers):
        assert view.buffers[i].device_address == driver.session.arena.address(buffer.name)
        assert view.buffers[i].host_address == driver.session.host_address(buffer.name)
    with driver.session.window("image") as window:
        assert driver.session.host_address("image") == window.ctypes.data
    assert driver.session.host_address("kv") is None
    assert view.stream is None


def test_a_contract_without_regions_has_an_empty_table(client: Client) -> None:
    kv = Buffer("kv", (2, 6, 4), DType.FLOAT32, Role.SWAP)
    contract = make_contract(buffers=replaced(BUFFERS, "kv", kv), regions=(), extents=())
    driver = Driver(client, Session(contract, BODIES))
    assert not [line for line in client.describe(driver.view.address) if line.startswith("region")]
    assert driver.call("find_region", b"kv", c_uint32()) is Status.UNKNOWN_REGION
    assert driver.call("live_rows", 0, c_uint64()) is Status.UNKNOWN_REGION


def test_the_capsule_carries_the_address_under_its_name(driver: Driver) -> None:
    prototype = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    get = prototype(("PyCapsule_GetPointer", ctypes.pythonapi))
    capsule = driver.view.capsule
    assert type(capsule).__name__ == "PyCapsule"
    assert get(capsule, CAPSULE_NAME) == driver.view.address
    with pytest.raises(ValueError, match="incorrect name"):
        get(capsule, b"flashrt_ros.contract.v2")


# --- Cost


def test_a_view_that_nobody_holds_goes_away_and_frees_the_window_it_had_lent(client: Client) -> None:
    session = make_session()
    session.act()
    driver = Driver(client, session)
    assert driver.begin_fill("image")[0] is Status.OK
    gone = weakref.ref(driver.view)
    del driver
    gc.collect()
    assert gone() is None
    session.fill("image", image(2))
    assert session.act() == ("context", "action")


def test_calls_from_c_leave_nothing_behind(driver: Driver) -> None:
    def work(times: int) -> None:
        for i in range(times):
            assert driver.decide(image(i % 256))[0] is Status.OK
            assert driver.read("image", 0, 1 + i % 8)[0] is Status.OK

    work(100)
    tracemalloc.start()
    try:
        work(500)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        work(2000)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
        assert grown < 2000 * 16  # one object kept of each call would be 32 bytes or more
    finally:
        tracemalloc.stop()
