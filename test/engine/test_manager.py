"""Many sessions over one working set behave as if each had a machine of its own."""

from __future__ import annotations

import gc
import resource
import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from flashrt_ros.engine import SessionLimitError, SessionManager, StateError
from flashrt_ros.engine.copier import Move, copy_with_torch
from flashrt_ros.engine.layout import Segment

from .test_capsules import acted, continuation
from .toy import expected, image, make_session, tokens


def manager_with(*names: str) -> SessionManager:
    manager = SessionManager(acted(), build=lambda: make_session(seed=9))
    for name in names:
        manager.open(name)
    return manager


def test_interleaved_sessions_equal_undisturbed_ones() -> None:
    manager = manager_with("a", "b")
    bits: dict[str, bytes] = {"a": b"", "b": b""}
    for step in range(4):
        for name in bits:
            with manager.use(name) as session:
                if step == 0:
                    session.seed(ord(name))
                    session.fill("tokens", tokens(*[ord(name)] * 4))
                bits[name] += continuation(session, steps=2)
    for name, got in bits.items():
        alone = acted()
        alone.seed(ord(name))
        alone.fill("tokens", tokens(*[ord(name)] * 4))
        assert got == b"".join(continuation(alone, steps=2) for _ in range(4))


def test_a_switch_copies_only_what_differs() -> None:
    copied: list[str] = []

    def recording(arena: torch.Tensor, segments: Sequence[Segment]) -> Move:
        move = copy_with_torch(arena, segments)

        def record(packed: torch.Tensor, gather: bool) -> None:
            copied.extend(segment.region.name for segment in segments)
            move(packed, gather)

        return record

    manager = SessionManager(acted(copy_regions=recording))
    manager.open("a")
    copied.clear()
    for name in ("a", "main", "a"):
        with manager.use(name):
            pass
    assert copied.count("kv") == 1  # "main" was saved once; nothing else ever changed
    copied.clear()
    with manager.use("a") as session:
        session.fill("image", image(5))
        session.act()
    with manager.use("main"):
        pass
    assert copied == ["kv", "kv"]  # out for "a", in for "main"; the prompt is the same in both


def test_a_fork_begins_as_the_resident_session_is_and_goes_its_own_way() -> None:
    manager = manager_with("a")
    with manager.use("a") as session:
        session.fill("tokens", tokens(4, 4, 4, 4))
        continuation(session)
        manager_bits = session.read("actions").tobytes()
    with pytest.raises(SessionLimitError, match="'a' is open already"):
        manager.open("a", fork=True)
    manager.open("b", fork=True)
    manager.switch_to("b")
    with manager.use("b") as session:
        assert session.read("actions").tobytes() == manager_bits
        session.fill("tokens", tokens(1, 1, 1, 1))
        forked = continuation(session)
    with manager.use("a") as session:
        assert continuation(session) != forked


def test_a_session_that_awaits_a_window_still_awaits_it_when_its_turn_comes_again() -> None:
    manager = manager_with("a")
    with manager.use("a") as session, pytest.raises(ZeroDivisionError), session.window("image") as view:
        view[0] = 1 // 0
    manager.switch_to("main")
    with manager.use("a") as session:
        assert "image" in session.unfilled


def test_a_session_with_its_own_buffers_needs_no_switch() -> None:
    manager = manager_with()
    manager.open("own", own_buffers=True)
    with manager.use("own") as own:
        own.act()
    with manager.use("main") as shared:
        assert shared is not own
    assert manager.switches == 0
    manager.close("own")
    assert manager.names == ("main",)


def test_ten_thousand_switches_leak_nothing() -> None:
    manager = manager_with("a", "b")

    def spin(rounds: int) -> None:
        for number in range(rounds):
            with manager.use(("main", "a", "b")[number % 3]) as session:
                session.draw()
                session.act()

    spin(2_000)
    gc.collect()
    objects, peak = len(gc.get_objects()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    spin(10_000)
    gc.collect()
    assert len(gc.get_objects()) - objects < 100
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 4096  # KiB


def test_the_number_of_sessions_is_bounded_and_names_are_unique() -> None:
    manager = SessionManager(acted(), capacity=2)
    manager.open("a")
    with pytest.raises(SessionLimitError, match="2 sessions are open already"):
        manager.open("b")
    manager.close("a")
    manager.open("b")
    with pytest.raises(SessionLimitError, match="'b' is open already"):
        manager.open("b")


def test_mistakes_are_named() -> None:
    manager = SessionManager(acted())
    with pytest.raises(SessionLimitError, match="no session called 'x' is open; open are: main"), manager.use("x"):
        pytest.fail("must not be entered")
    with pytest.raises(SessionLimitError, match="'main' is resident"):
        manager.close("main")
    with pytest.raises(SessionLimitError, match="without `build`"):
        manager.open("own", own_buffers=True)
    with manager.use("main"), pytest.raises(StateError, match="using a session"), manager.use("main"):
        pytest.fail("must not be entered")


def test_waiting_threads_are_served_in_order_of_coming() -> None:
    manager = manager_with("a")
    order: list[int] = []

    def visit(number: int) -> None:
        with manager.use("a"):
            order.append(number)

    threads = []
    with manager.use("main"):
        for number in range(6):
            thread = threading.Thread(target=visit, args=(number,))
            thread.start()
            threads.append(thread)
            while len(manager._turns._queue) < number + 2:  # until it waits
                thread.join(0.001)
    for thread in threads:
        thread.join(10)
    assert order == list(range(6))


class CapsuleMachine(RuleBasedStateMachine):
    """Random fills, decisions, snapshots, restores, forks and drops, against a model that recomputes everything."""

    names = Bundle("names")

    @initialize()
    def start(self) -> None:
        self.sessions = [acted(seed=1), acted(seed=2)]
        for session in self.sessions:
            session.set_extent("rows", 6)  # the toy's action reads all rows, and only live ones come back
        self.sessions[1]._capsules = self.sessions[0].capsules
        self.models = [self._model(session) for session in self.sessions]
        self.saved: dict[str, dict[str, object]] = {}

    @staticmethod
    def _model(session: object) -> dict[str, object]:
        return {
            "image": image(1),
            "window": image(1),
            "tokens": tokens(5, 6, 7, 8),
            "live": 2,
            "noise": session.read("noise"),  # type: ignore[attr-defined]
        }

    @rule(which=st.integers(0, 1), value=st.integers(0, 255))
    def see(self, which: int, value: int) -> None:
        self.sessions[which].fill("image", image(value))
        self.models[which]["image"] = image(value)
        self.models[which]["window"] = image(value)

    @rule(which=st.integers(0, 1), value=st.integers(-99, 99))
    def say(self, which: int, value: int) -> None:
        self.sessions[which].fill("tokens", tokens(value, value, value, value))
        self.models[which]["tokens"] = tokens(value, value, value, value)

    @rule(which=st.integers(0, 1), variant=st.sampled_from([("short", 2), ("long", 4)]))
    def shape(self, which: int, variant: tuple[str, int]) -> None:
        self.sessions[which].select(variant[0])
        self.models[which]["live"] = variant[1]

    @rule(which=st.integers(0, 1))
    def decide(self, which: int) -> None:
        session, model = self.sessions[which], self.models[which]
        if "image" in session.unfilled or model["image"] is not model["window"]:
            session.fill("image", np.asarray(model["window"]))
        if "tokens" in session.unfilled:
            session.fill("tokens", np.asarray(model["tokens"]))
        session.draw()
        session.act()
        model["image"] = model["window"]
        want = expected(model["image"], model["tokens"], session.read("noise"), model["live"])  # type: ignore[arg-type]
        np.testing.assert_array_equal(session.read("actions"), want)

    @rule(target=names, which=st.integers(0, 1), name=st.sampled_from("abc"))
    def snapshot(self, which: int, name: str) -> str:
        self.sessions[which].snapshot(name, replace=True)
        self.saved[name] = dict(self.models[which])
        return name

    @rule(name=names, which=st.integers(0, 1))
    def restore(self, name: str, which: int) -> None:
        if name in self.saved:
            self.sessions[which].restore(name)
            self.models[which] = {**self.saved[name], "window": self.models[which]["window"]}

    @rule(name=names, which=st.integers(0, 1))
    def fork(self, name: str, which: int) -> None:
        if name in self.saved:
            self.sessions[which].fork(name, self.sessions[1 - which])
            self.models[1 - which] = {**self.saved[name], "window": self.models[1 - which]["window"]}

    @rule(name=names)
    def drop(self, name: str) -> None:
        if self.saved.pop(name, None) is not None:
            self.sessions[0].capsules.drop(name)

    @invariant()
    def the_store_lists_what_was_saved(self) -> None:
        if hasattr(self, "saved"):
            assert {capsule.name for capsule in self.sessions[0].capsules.list()} == set(self.saved)


def test_a_fork_brings_back_what_another_shape_has_overwritten() -> None:
    machine = CapsuleMachine()
    machine.start()
    machine.decide(which=1)
    name = machine.snapshot(name="a", which=1)
    machine.shape(variant=("long", 4), which=1)
    machine.decide(which=1)
    machine.fork(name=name, which=0)
    machine.decide(which=1)


TestRandomSequences = CapsuleMachine.TestCase
TestRandomSequences.settings = settings(max_examples=400, stateful_step_count=25, deadline=None)
