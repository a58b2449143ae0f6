"""Epochs: a result is published if and only if nothing has begun a new epoch since its decision began."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrt_ros.node.epochs import ClockWatch, EpochCause, Epochs


@pytest.mark.parametrize("cause", EpochCause)
def test_each_cause_begins_an_epoch_and_drops_the_result_under_way(cause: EpochCause) -> None:
    epochs = Epochs()
    started_in = epochs.current
    assert epochs.begin(cause) == started_in + 1
    with epochs.publishing(started_in) as chunk_id:
        assert chunk_id is None
    assert epochs.dropped == 1
    assert epochs.causes == {cause: 1}
    with epochs.publishing(epochs.current) as chunk_id:
        assert chunk_id == 1


@given(events=st.lists(st.sampled_from(("decide", "begin", "publish")), max_size=40))
def test_chunk_ids_rise_strictly_over_all_epochs_and_old_results_never_get_one(events: list[str]) -> None:
    epochs, decided, ids = Epochs(), 0, [0]
    for event in events:
        if event == "decide":
            decided = epochs.current
        elif event == "begin":
            epochs.begin(EpochCause.INSTRUCTION)
        else:
            with epochs.publishing(decided) as chunk_id:
                assert (chunk_id is not None) == (decided == epochs.current)
                ids += [chunk_id] if chunk_id is not None else []
    assert all(later > earlier for earlier, later in pairwise(ids))
    assert epochs.last_chunk_id == ids[-1]


def test_an_id_whose_publication_failed_is_not_used_again() -> None:
    epochs = Epochs()
    with pytest.raises(RuntimeError, match="middleware"), epochs.publishing(0) as failed:
        raise RuntimeError("the middleware is gone")
    with epochs.publishing(0) as chunk_id:
        assert (failed, chunk_id) == (1, 2)


def test_an_epoch_cannot_begin_while_a_result_of_the_last_one_is_being_published() -> None:
    epochs, order = Epochs(), []
    waiting = threading.Event()

    def change_the_instruction() -> None:
        waiting.set()
        epochs.begin(EpochCause.INSTRUCTION)
        order.append("epoch")

    callback = threading.Thread(target=change_the_instruction)
    with epochs.publishing(0) as chunk_id:
        callback.start()
        assert waiting.wait(10)
        callback.join(0.05)
        assert callback.is_alive()
        assert chunk_id == 1
        order.append("chunk")
    callback.join(10)
    assert order == ["chunk", "epoch"]


def test_a_clock_that_jumps_back_is_seen_once() -> None:
    watch = ClockWatch()
    assert [watch.jumped_back(now) for now in (5, 5, 9, 3, 3, 4)] == [False, False, False, True, False, False]


def test_after_a_reset_any_time_is_the_first() -> None:
    watch = ClockWatch()
    watch.jumped_back(100)
    watch.reset()
    assert not watch.jumped_back(1)
