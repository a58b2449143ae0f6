"""A capsule and its session share what they can, and neither sees what becomes of the other."""

from __future__ import annotations

import copy
from collections.abc import Callable

from flashrt_ros.engine.capsule import SessionState

from .test_capsules import acted


def test_what_a_session_does_later_leaves_the_rest_of_a_capsules_state_alone() -> None:
    session = acted()
    session.notes["instruction"] = "pick up the cup"
    state = session.snapshot("here").state
    then = copy.deepcopy(state)
    changes: tuple[Callable[[], None], ...] = (
        lambda: session.notes.update(instruction="wave", observation="7"),
        lambda: session.set_extent("rows", 3),
        session.draw,
        lambda: session.seed(5),
    )
    for change in changes:
        change()
        assert_equal_states(state, then)
        session.restore("here")
        assert (session.extents, session.notes, session.variant) == (then.extents, then.notes, then.ledger.variant)
        change()
        assert_equal_states(state, then)


def assert_equal_states(one: SessionState, two: SessionState) -> None:
    assert (one.extents, one.notes, one.unfilled) == (two.extents, two.notes, two.unfilled)
    assert (one.ledger.versions, one.ledger.variant) == (two.ledger.versions, two.ledger.variant)
    assert one.generator.equal(two.generator)


def test_a_shape_key_that_is_chosen_between_two_snapshots_is_that_of_the_second_only() -> None:
    session = acted()
    session.snapshot("short")
    session.select("long")
    session.snapshot("long")
    for name in ("short", "long"):
        assert session.restore(name).state.ledger.variant == session.variant == name


def test_the_live_rows_come_back_after_others_were_live() -> None:
    session = acted()
    session.snapshot("four")
    session.set_extent("rows", 6)
    session.snapshot("six")
    for name, rows in (("four", 4), ("six", 6), ("six", 6), ("four", 4)):
        session.restore(name)
        assert session.extents == {"rows": rows}
        assert session.snapshot("again", replace=True).layout.extents == {"rows": rows}
        session.set_extent("rows", 2)
        assert session.snapshot("again", replace=True).layout.extents == {"rows": 2}


def test_a_capsule_that_was_replaced_keeps_its_state_for_whoever_holds_it() -> None:
    session = acted()
    session.notes["instruction"] = "pick up the cup"
    old = session.snapshot("here")
    then = copy.deepcopy(old.state)
    session.notes["instruction"] = "wave"
    session.draw()
    session.act()
    assert session.snapshot("here", replace=True).notes == {"instruction": "wave"}
    replaced = [session.capsules.replaced]
    session.draw()
    replaced.append(session.capsules.replaced)
    assert replaced == [old, None]  # let go while a GPU is at work
    assert_equal_states(old.state, then)
