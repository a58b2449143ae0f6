"""A contract that contradicts itself is refused, and the message names the culprit."""

from __future__ import annotations

from typing import Any

import pytest

from flashrt_ros.contract import (
    Buffer,
    ContractError,
    DType,
    Extent,
    Rate,
    Region,
    Role,
    Stage,
    Variant,
)

from .builders import BUFFERS, REGIONS, STAGES, make_contract, replaced


def test_the_toy_contract_is_accepted_and_ordered_by_dependency() -> None:
    assert [stage.name for stage in make_contract().order] == [
        "tables",
        "prompt",
        "context",
        "action",
    ]


def test_dependencies_beat_declaration_order_within_one_rate() -> None:
    buffers = (*BUFFERS, Buffer("late", (4,), DType.FLOAT32, Role.STATE))
    regions = (*REGIONS, Region("late", "late", 0, 16))
    second = Stage("second", Rate.OBSERVATION, reads=("kv",), writes=("late",))
    order = [s.name for s in make_contract(buffers=buffers, regions=regions, stages=(second, *STAGES)).order]
    assert order.index("second") == order.index("context") + 1


def test_after_orders_stages_that_share_no_buffer() -> None:
    buffers = (*BUFFERS, Buffer("log", (1,), DType.INT32, Role.SCRATCH))
    log = Stage("log", Rate.CHECKPOINT, writes=("log",), after=("tables",))
    order = [s.name for s in make_contract(buffers=buffers, stages=(log, *STAGES)).order]
    assert order.index("tables") < order.index("log")


def test_unknown_buffer_with_a_near_name() -> None:
    stages = replaced(
        STAGES,
        "prompt",
        Stage("prompt", Rate.PROMPT, reads=("token",), writes=("prompt",)),
    )
    with pytest.raises(
        ContractError,
        match="stage 'prompt': unknown buffer 'token'; did you mean 'tokens'",
    ):
        make_contract(stages=stages)


def test_unknown_buffer_without_a_near_name_lists_the_known_ones() -> None:
    stages = replaced(
        STAGES,
        "prompt",
        Stage("prompt", Rate.PROMPT, reads=("zzz",), writes=("prompt",)),
    )
    with pytest.raises(ContractError, match="known: actions, hidden, image"):
        make_contract(stages=stages)


def test_two_writers_in_one_rate() -> None:
    stages = (
        *STAGES,
        Stage("other", Rate.OBSERVATION, reads=("image",), writes=("kv",)),
    )
    with pytest.raises(
        ContractError,
        match="buffer 'kv' has two writers at rate OBSERVATION: 'context' and 'other'",
    ):
        make_contract(stages=stages)


def test_two_writers_in_two_rates_are_allowed_slower_first() -> None:
    stages = (*STAGES, Stage("init", Rate.PROMPT, writes=("kv",)))
    order = [stage.name for stage in make_contract(stages=stages).order]
    assert order.index("init") < order.index("context")


def test_cycle_names_its_stages() -> None:
    buffers = (*BUFFERS, *(Buffer(n, (1,), DType.INT32, Role.STATE) for n in "xy"))
    regions = (*REGIONS, Region("x", "x", 0, 4), Region("y", "y", 0, 4))
    one = Stage("one", Rate.STEP, reads=("y",), writes=("x",))
    two = Stage("two", Rate.STEP, reads=("x",), writes=("y",))
    with pytest.raises(ContractError, match=r"cycle: (one -> two -> one|two -> one -> two)"):
        make_contract(buffers=buffers, regions=regions, stages=(*STAGES, one, two))


def test_missing_prerequisite_buffer() -> None:
    with pytest.raises(
        ContractError,
        match="stage 'action': missing prerequisite, no stage writes STATE buffer 'kv'",
    ):
        make_contract(stages=replaced(STAGES, "context"))


def test_missing_prerequisite_window_without_rate_or_writer() -> None:
    buffers = replaced(BUFFERS, "image", Buffer("image", (8,), DType.UINT8, Role.SWAP))
    with pytest.raises(ContractError, match="no stage writes SWAP buffer 'image' and it has no rate"):
        make_contract(buffers=buffers)


def test_missing_prerequisite_stage() -> None:
    late = Stage("late", Rate.STEP, writes=("hidden",), after=("tabels",))
    with pytest.raises(
        ContractError,
        match="missing prerequisite, unknown stage 'tabels'; did you mean 'tables'",
    ):
        make_contract(stages=(late, *replaced(STAGES, "action")))


def test_slower_stage_may_not_read_a_faster_value() -> None:
    slow = Stage(
        "context",
        Rate.PROMPT,
        reads=("image", "prompt"),
        writes=("kv",),
        variants=("short", "long"),
    )
    with pytest.raises(
        ContractError,
        match=r"'context' \(PROMPT\) reads 'image', which changes faster \(OBSERVATION\)",
    ):
        make_contract(stages=replaced(STAGES, "context", slow))


def test_slower_stage_may_not_come_after_a_faster_one() -> None:
    slow = Stage("tables", Rate.CHECKPOINT, writes=("table",), after=("context",))
    with pytest.raises(
        ContractError,
        match=r"'tables' .CHECKPOINT. comes after 'context', which is faster",
    ):
        make_contract(stages=replaced(STAGES, "tables", slow))


def test_static_is_not_written_in_the_hot_loop() -> None:
    hot = Stage("hot", Rate.OBSERVATION, reads=("image",), writes=("table",))
    with pytest.raises(ContractError, match=r"'hot' .OBSERVATION. writes STATIC buffer 'table'"):
        make_contract(stages=(*STAGES, hot))


def test_host_windows_are_not_written_by_stages() -> None:
    with pytest.raises(ContractError, match="'rude' writes 'noise', a window that the host fills"):
        make_contract(stages=(*STAGES, Stage("rude", Rate.STEP, writes=("noise",))))


def test_scratch_does_not_cross_a_stage_boundary() -> None:
    peek = Stage("peek", Rate.STEP, reads=("hidden",), writes=("kv",))
    with pytest.raises(ContractError, match="'peek' reads SCRATCH buffer 'hidden' of stage 'action'"):
        make_contract(stages=(*STAGES, peek))


def test_overlapping_regions() -> None:
    regions = (*REGIONS, Region("tail", "kv", 96, 96))
    with pytest.raises(
        ContractError,
        match=r"regions 'kv' and 'tail' overlap in buffer 'kv': bytes \[0, 192\)",
    ):
        make_contract(regions=regions)


def test_touching_regions_do_not_overlap() -> None:
    halves = (
        Region("low", "kv", 0, 96),
        Region("high", "kv", 96, 96),
        Region("prompt", "prompt", 0, 16),
    )
    assert len(make_contract(regions=halves).regions) == 3


@pytest.mark.parametrize(
    ("offset", "nbytes", "fits"),
    [(0, 192, True), (0, 193, False), (188, 4, True), (188, 5, False)],
)
def test_regions_stay_inside_their_buffer(offset: int, nbytes: int, fits: bool) -> None:
    region = Region("kv", "kv", offset, nbytes)
    if fits:
        assert make_contract(regions=(region,)).regions == (region,)
    else:
        with pytest.raises(ContractError, match="of buffer 'kv', which has only 192"):
            make_contract(regions=(region,))


def test_region_of_an_unknown_buffer() -> None:
    with pytest.raises(ContractError, match="region 'r': unknown buffer 'kw'; known: actions"):
        make_contract(regions=(*REGIONS, Region("r", "kw", 0, 4)))


def test_region_of_scratch() -> None:
    with pytest.raises(ContractError, match="saves SCRATCH buffer 'hidden'"):
        make_contract(regions=(*REGIONS, Region("r", "hidden", 0, 4)))


def test_region_with_an_unknown_extent() -> None:
    with pytest.raises(ContractError, match="unknown extent 'cols'; known: rows"):
        make_contract(regions=(Region("kv", "kv", 0, 192, 2, live="cols"),))


def test_region_rows_must_divide_by_the_extent() -> None:
    with pytest.raises(ContractError, match="96 bytes does not divide into the 7 rows of extent 'rows'"):
        make_contract(extents=(Extent("rows", 7),))


def test_state_that_no_region_saves() -> None:
    with pytest.raises(ContractError, match="STATE buffer 'kv' has no region"):
        make_contract(regions=())


def test_shape_without_a_captured_variant() -> None:
    variants = (Variant("short"), Variant("long"), Variant("longer"))
    with pytest.raises(ContractError, match="shape 'longer' has no captured variant of stage 'context'"):
        make_contract(variants=variants)


def test_stage_with_an_unknown_variant() -> None:
    with pytest.raises(ContractError, match="unknown variant 'long'; known: short"):
        make_contract(variants=(Variant("short"),))


@pytest.mark.parametrize(
    ("part", "items"),
    [
        ("buffers", (*BUFFERS, BUFFERS[0])),
        ("stages", (*STAGES, STAGES[0])),
        ("regions", (*REGIONS, REGIONS[1])),
    ],
)
def test_repeated_names(part: str, items: tuple[Any, ...]) -> None:
    with pytest.raises(ContractError, match="is declared 2 times"):
        make_contract(**{part: items})


def test_a_contract_without_stages() -> None:
    with pytest.raises(ContractError, match="has no stage"):
        make_contract(stages=(), regions=(), buffers=())


def test_asking_for_what_is_not_there() -> None:
    with pytest.raises(ContractError, match="unknown stage 'contxt'; did you mean 'context'"):
        make_contract().stage("contxt")
