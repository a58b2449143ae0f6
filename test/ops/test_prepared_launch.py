"""A prepared launch says at each call what its arguments hold and which stream is current.

A machine without a GPU has no driver, so a function in Python stands in for it, which reads what it is given as C does.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from flashrt_ros.contract import Region
from flashrt_ros.engine.layout import Segment
from flashrt_ros.ops.cuda import prepared
from flashrt_ros.ops.cuda.capsule import PreparedCopy
from flashrt_ros.ops.cuda.errors import KernelError
from flashrt_ros.ops.cuda.prepared import LaunchConfig, PreparedLaunch

HANDLE = 0x7FFF_FFFF_F001  # needs more than 32 bits
STREAM = 0x7FFF_0000_0009
KERNEL = SimpleNamespace(
    name="k", device=torch.device("cuda", 0), shared_bytes=7, driver_kernel=SimpleNamespace(handle=HANDLE)
)
POINTER = ctypes.c_void_p
LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(LaunchConfig), POINTER, ctypes.POINTER(POINTER), POINTER)


class Launched(NamedTuple):
    """What one launch was given; the arguments as addresses of 64 bits each."""

    grid: tuple[int, ...]
    stream: int | None
    function: int
    arguments: list[int]


class StandIn:
    """The driver: notes down its launches, of which each has so many arguments of 64 bits."""

    def __init__(self, arguments: int) -> None:
        self.seen: list[Launched] = []
        self.repeated: list[str] = []
        self.result = 0
        self.stream = STREAM
        self._count = arguments
        self._launch = LAUNCH(self._note)
        # As of a library: no types are declared, so each argument has to be in the form in which C takes it.
        self.launch = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.cast(self._launch, POINTER).value or 0)

    def _note(self, config: ctypes._Pointer[LaunchConfig], function: int, arguments: object, extra: object) -> int:
        told = config.contents
        values = [ctypes.c_int64.from_address(arguments[i]).value for i in range(self._count)]  # type: ignore[index]
        shape = (*told.grid, *told.block, told.shared_bytes, told.attribute_count)
        assert extra is None
        self.seen.append(Launched(shape, told.stream, function, values))
        return self.result

    def again(self, what: str, device: torch.device, call: object) -> None:
        self.repeated.append(what)
        self.result = 0
        assert call() == 0  # type: ignore[operator]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    found = StandIn(2)
    monkeypatch.setattr(prepared, "driver", lambda: found)
    monkeypatch.setattr(prepared, "current_stream", lambda index: found.stream)
    return found


def test_the_configuration_is_laid_out_as_the_drivers() -> None:
    bindings = pytest.importorskip("cuda.bindings.driver")
    theirs = bindings.CUlaunchConfig()
    theirs.gridDimX, theirs.gridDimY, theirs.gridDimZ = 1, 2, 3
    theirs.blockDimX, theirs.blockDimY, theirs.blockDimZ = 4, 5, 6
    theirs.sharedMemBytes, theirs.hStream, theirs.numAttrs = 7, STREAM, 0
    ours = LaunchConfig((1, 2, 3), (4, 5, 6), 7, STREAM)
    assert bytes(ours) == ctypes.string_at(theirs.getPtr(), ctypes.sizeof(ours))


def test_everything_arrives_whole_and_as_it_is_at_the_call(driver: StandIn) -> None:
    first, second = ctypes.c_int64(HANDLE + 1), ctypes.c_int64(2)
    launch = PreparedLaunch(KERNEL, 2**32 - 1, 256, (first, second))  # type: ignore[arg-type]
    launch()
    shape = (2**32 - 1, 1, 1, 256, 1, 1, 7, 0)
    assert driver.seen.pop() == (shape, STREAM, HANDLE, [HANDLE + 1, 2])
    second.value = HANDLE
    for stream, told in ((STREAM + 1, STREAM + 1), (0, None), (STREAM, STREAM)):
        driver.stream = stream
        launch()
        assert driver.seen.pop() == (shape, told, HANDLE, [HANDLE + 1, HANDLE])


def test_a_launch_that_fails_is_repeated(driver: StandIn) -> None:
    launch = PreparedLaunch(KERNEL, 1, 1, (ctypes.c_int64(1), ctypes.c_int64(2)))  # type: ignore[arg-type]
    driver.result = 201
    launch()
    assert driver.repeated == ["'k'"]
    assert driver.seen[0] == driver.seen[1]


def test_a_copy_follows_its_block(driver: StandIn) -> None:
    arena = torch.zeros(64, dtype=torch.uint8)
    copy = PreparedCopy(KERNEL, arena, [Segment(Region("a", "b", 0, 16, 1), 0, 16, 1, 16, 0)])  # type: ignore[arg-type]
    memory = torch.zeros(160, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 16 :]
    one, two = memory[:16], memory[16:32]
    for block in (one, two, two, one, memory[32:48], memory[48:64], one):  # some are gone when the next one comes
        copy(block, True)
        assert driver.seen.pop().arguments == [arena.data_ptr(), block.data_ptr()]
    with pytest.raises(KernelError, match="aligned to 16 bytes"):
        copy(memory[1:17], True)
    copy(one, False)
    assert [launched.arguments[1] for launched in driver.seen] == [one.data_ptr()]
