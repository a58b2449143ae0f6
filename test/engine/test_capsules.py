"""A capsule brings back everything that decides what happens next, and nothing that it does not hold."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch

from flashrt_ros.engine import (
    BudgetFullError,
    CapsuleExistsError,
    CapsuleKeptError,
    CapsuleNameError,
    CapsuleStore,
    FingerprintError,
    Session,
    StateError,
    Tier,
    UnfilledWindowError,
    UnknownCapsuleError,
)
from flashrt_ros.engine.copier import CopyRegions, copy_with_torch

from ..contract.builders import IDENTITY, make_contract
from .toy import BODIES, expected, image, make_session, tokens


def acted(seed: int = 0, copy_regions: CopyRegions = copy_with_torch) -> Session:
    session = make_session(seed, copy_regions=copy_regions)
    session.set_extent("rows", 4)
    session.act()
    return session


def continuation(session: Session, steps: int = 3) -> bytes:
    """The bits of the next decisions, each with a new image and new noise."""
    bits = b""
    for step in range(steps):
        session.fill("image", image(20 + step))
        session.draw()
        session.act()
        bits += session.read("actions").tobytes()
    return bits


def test_a_restored_continuation_equals_the_uninterrupted_one_bit_for_bit() -> None:
    session = acted()
    session.snapshot("here")
    uninterrupted = continuation(session)
    session.fill("tokens", tokens(9, 9, 9, 9))
    session.select("long")
    session.seed(99)
    continuation(session)
    session.restore("here")
    assert session.variant == "short"
    assert continuation(session) == uninterrupted


def test_restore_brings_back_actions_without_replaying_what_is_saved() -> None:
    session = acted()
    before = session.read("kv")
    session.snapshot("here")
    session.fill("image", image(200))
    session.act()
    session.restore("here")
    assert session.act() == ("action",)  # the actions are no region, so they are made again from the saved K/V
    np.testing.assert_array_equal(session.read("kv")[:, :4], before[:, :4])


def test_what_a_session_does_later_leaves_the_books_of_a_capsule_alone() -> None:
    session = acted()
    ledger = session.snapshot("here").state.ledger
    then = copy.deepcopy(ledger)
    for change in (
        lambda: session.fill("image", image(7)),
        lambda: session.set_extent("rows", 3),
        session.act,
        lambda: session.select("long"),
    ):
        change()
        assert ledger == then
        session.restore("here")
        change()
        assert ledger == then


def test_restore_brings_the_versions_back_so_a_new_image_is_still_news() -> None:
    session = acted()
    versions = session.versions
    session.snapshot("here")
    continuation(session)
    session.restore("here")
    assert session.versions == versions
    session.draw()
    session.act()
    session.fill("image", image(2))
    assert session.act() == ("context", "action")


def test_a_stage_never_reads_an_image_that_the_capsule_did_not_see() -> None:
    session = acted()
    session.snapshot("here")
    session.fill("image", image(77))
    session.act()
    session.restore("here")
    session.fill("tokens", tokens(1, 1, 1, 1))  # makes the context stale, but the window holds the foreign image
    with pytest.raises(UnfilledWindowError, match=r"stage 'context' needs windows .*: image"):
        session.act()
    session.fill("image", image(3))
    session.act()
    noise = session.read("noise")
    np.testing.assert_array_equal(session.read("actions"), expected(image(3), tokens(1, 1, 1, 1), noise))


def test_a_snapshot_of_a_session_that_awaits_a_window_still_awaits_it_after_a_restore() -> None:
    origin, twin = acted(), acted()
    origin.fill("tokens", tokens(0, 0, 0, 0))
    origin.snapshot("first")
    origin.fork("first", twin)  # the twin's own window still holds other tokens than its state believes
    assert "tokens" in twin.unfilled
    twin.snapshot("second")
    twin.restore("second")
    assert "tokens" in twin.unfilled
    with pytest.raises(UnfilledWindowError, match="'prompt' needs windows .*: tokens"):
        twin.act()


def test_a_torn_window_is_still_torn_after_a_restore() -> None:
    session = acted()
    with pytest.raises(ZeroDivisionError), session.window("image") as view:
        view[0] = 1 // 0
    session.snapshot("torn")
    session.restore("torn")
    with pytest.raises(UnfilledWindowError, match="'context' needs windows .*: image"):
        session.act()


def test_an_image_that_is_still_the_same_needs_no_refill() -> None:
    session = acted()
    session.snapshot("here")
    session.restore("here")
    assert session.unfilled == frozenset()


def test_only_live_rows_are_copied() -> None:
    session = make_session()
    session.act()
    sizes = []
    for rows in (0, 1, 6):
        session.set_extent("rows", rows)
        sizes.append(session.snapshot(f"rows{rows}").nbytes)
    prompt = 16
    assert sizes == [prompt, prompt + 2 * 1 * 16, prompt + 2 * 6 * 16]


def test_live_rows_come_back_and_dead_rows_are_left_alone() -> None:
    session = acted()
    saved = session.read("kv")
    session.snapshot("here")
    session.fill("image", image(50))
    session.act()
    later = session.read("kv")
    session.restore("here")
    session.act()
    now = session.arena["kv"].numpy()
    np.testing.assert_array_equal(now[:, :4], saved[:, :4])
    np.testing.assert_array_equal(now[:, 4:], later[:, 4:])


def test_more_rows_becoming_live_is_a_change_that_a_later_restore_sees() -> None:
    session = acted()
    session.snapshot("four")
    session.set_extent("rows", 6)
    session.snapshot("six")
    everything = session.read("kv")
    session.restore("four")
    session.arena["kv"][:, 4:] = -1
    session.restore("six")
    np.testing.assert_array_equal(session.arena["kv"].numpy(), everything)


def test_two_forks_diverge_independently() -> None:
    origin = acted(seed=5)
    origin.snapshot("start")
    reference = continuation(origin)
    one, two = acted(seed=1), acted(seed=2)
    origin.fork("start", one)
    origin.fork("start", two)
    one.fill("tokens", tokens(3, 3, 3, 3))
    changed = continuation(one)
    assert continuation(two) == reference
    assert changed != reference


def test_a_to_b_to_a_equals_a_fresh_a() -> None:
    fresh = acted(seed=4)
    expected_bits = continuation(fresh)
    session = acted(seed=4)
    session.snapshot("a")
    session.fill("tokens", tokens(8, 8, 8, 8))
    continuation(session)
    session.snapshot("b")
    session.restore("a")
    assert continuation(session) == expected_bits


def test_notes_travel_with_the_capsule() -> None:
    session = acted()
    session.notes["instruction"] = "pick up the cup"
    capsule = session.snapshot("here", description="before the cup")
    session.notes["instruction"] = "wave"
    session.restore("here")
    assert session.notes == {"instruction": "pick up the cup"}
    assert (capsule.description, capsule.notes["instruction"]) == ("before the cup", "pick up the cup")


def test_a_capsule_of_another_contract_is_refused_with_the_fields() -> None:
    session = acted()
    session.snapshot("here")
    other = Session(make_contract(identity=dataclasses.replace(IDENTITY, weights="ff", chunk=5)), BODIES)
    other.configure()
    versions = other.versions
    with pytest.raises(FingerprintError, match="these differ: weights, chunk") as caught:
        session.fork("here", other)
    assert caught.value.fields == ("weights", "chunk")
    assert other.versions == versions


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "-x", "a" * 65, "é", "a b", "a\n"])
def test_names_that_could_escape_are_refused(name: str) -> None:
    session = acted()
    for call in (session.snapshot, session.restore, session.capsules.drop):
        with pytest.raises(CapsuleNameError, match="is not allowed"):
            call(name)


@pytest.mark.parametrize("name", ["a", "7", "a" * 64, "Task_2.before-pick"])
def test_names_at_the_edge_are_accepted(name: str) -> None:
    assert acted().snapshot(name).name == name


def test_unknown_names_list_the_known_ones() -> None:
    session = acted()
    session.snapshot("b")
    session.snapshot("a")
    with pytest.raises(UnknownCapsuleError, match="no capsule is called 'c'; there are: a, b"):
        session.restore("c")


def test_a_taken_name_is_replaced_only_on_request() -> None:
    session = acted()
    session.snapshot("a")
    with pytest.raises(CapsuleExistsError, match="'a' exists"):
        session.snapshot("a")
    session.snapshot("a", description="new", replace=True)
    assert [capsule.description for capsule in session.capsules.list()] == ["new"]


def test_no_snapshot_inside_a_stage() -> None:
    seen: list[str] = []

    def nosy(buffers: object, variant: object) -> None:
        BODIES["action"](buffers, variant)  # type: ignore[arg-type]
        if session is not None:
            with pytest.raises(StateError, match="being driven already") as caught:
                session.snapshot("inside")
            seen.append(str(caught.value))

    session: Session | None = None
    session = make_session(bodies={**BODIES, "action": nosy})
    session.act()
    assert len(seen) == 1
    assert len(session.capsules) == 0


def test_snapshot_and_restore_need_a_configured_session() -> None:
    with pytest.raises(StateError, match="not configured"):
        Session(make_contract(), BODIES).snapshot("a")


class TestBudget:
    """A toy capsule takes one 256-byte piece of a tier."""

    @staticmethod
    def session(device_pieces: int, host_pieces: int) -> Session:
        store = CapsuleStore(torch.device("cpu"), device_pieces * 256, host_pieces * 256)
        session = Session(make_contract(), BODIES, capsules=store)
        session.configure()
        session.fill("image", image(1))
        session.fill("tokens", tokens(5, 6, 7, 8))
        session.draw()
        session.act()
        return session

    @staticmethod
    def tiers(session: Session) -> dict[str, Tier]:
        return {capsule.name: capsule.tier for capsule in session.capsules.list()}

    def test_the_least_recently_used_is_demoted_and_still_restores(self) -> None:
        session = self.session(2, 2)
        session.set_extent("rows", 6)
        bits = session.read("kv").tobytes()
        for name in ("a", "b"):
            session.snapshot(name)
        session.restore("a")  # now "b" is the least recently used
        session.snapshot("c")
        assert self.tiers(session) == {"a": Tier.DEVICE, "b": Tier.HOST, "c": Tier.DEVICE}
        session.fill("image", image(9))
        session.act()
        session.restore("b")
        assert session.arena["kv"].numpy().tobytes() == bits

    def test_the_oldest_in_the_host_tier_is_evicted_and_noted(self) -> None:
        session = self.session(1, 1)
        for name in ("a", "b", "c"):
            session.snapshot(name)
        assert self.tiers(session) == {"b": Tier.HOST, "c": Tier.DEVICE}
        assert session.capsules.evicted == ["a"]

    def test_kept_capsules_are_never_evicted(self) -> None:
        session = self.session(1, 1)
        session.snapshot("a", keep=True)
        for name in ("b", "c", "d"):
            session.snapshot(name)
        assert self.tiers(session) == {"a": Tier.HOST, "d": Tier.DEVICE}

    def test_a_budget_full_of_kept_capsules_refuses_and_changes_nothing(self) -> None:
        session = self.session(1, 1)
        session.snapshot("a", keep=True)
        session.snapshot("b", keep=True)
        before = self.tiers(session)
        with pytest.raises(BudgetFullError, match="hold 2 capsules, 2 of them marked keep"):
            session.snapshot("c")
        assert self.tiers(session) == before
        session.draw()
        assert session.act() == ("action",)

    def test_a_refusal_evicts_nobody(self) -> None:
        session = self.session(1, 1)
        session.snapshot("small")
        store = session.capsules
        with pytest.raises(BudgetFullError):
            store.add("big", 1024, lambda block, tier: pytest.fail("must not be made"))
        assert list(self.tiers(session)) == ["small"]

    def test_no_budget_at_all(self) -> None:
        with pytest.raises(BudgetFullError, match="no room"):
            self.session(0, 0).snapshot("a")

    def test_dropping_frees_the_bytes(self) -> None:
        session = self.session(1, 0)
        session.snapshot("a")
        assert session.capsules.used(Tier.DEVICE) == 256
        session.capsules.drop("a")
        assert session.capsules.used(Tier.DEVICE) == 0
        session.snapshot("b")

    def test_kept_capsules_are_dropped_only_on_request(self) -> None:
        session = self.session(1, 0)
        session.snapshot("a", keep=True)
        with pytest.raises(CapsuleKeptError, match="marked keep"):
            session.capsules.drop("a")
        session.capsules.drop("a", drop_kept=True)
        assert len(session.capsules) == 0
