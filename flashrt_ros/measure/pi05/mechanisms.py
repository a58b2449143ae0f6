"""What a mechanism of ours is worth: pairs of candidates that differ in it alone, and give equal bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from ...engine.windows import WindowPath
from ...policies.pi05.policy import with_overlap
from ..errors import MeasureError
from ..rounds import Candidate
from .observations import Pixels
from .subject import Subject

FEW, SOME = 10, 30
"""Calls of a turn for what only a median is reported of; SOME where it is compared with a figure close to it."""
_OVERLAP = "overlap"  # the policy's setting that switches launch overlap
_MAPPED = "mapped_windows"
_OTHER_WINDOWS = {WindowPath.PINNED: WindowPath.MAPPED, WindowPath.MAPPED: WindowPath.PINNED}


@dataclass(frozen=True)
class Mechanisms:
    """On/off pairs: candidates to time, (off, on) names by mechanism, and reasons for pairs that cannot be timed."""

    candidates: Sequence[Candidate] = ()
    pairs: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)


def mechanisms(ours: Subject, pictures: list[Pixels], stack: ExitStack) -> Mechanisms:
    """The pairs of every mechanism; both sides of a pair must give equal bits."""
    reuse = _reuse_pair(ours)
    others = [_overlap_pair(ours, pictures, stack), _windows_pair(ours, pictures, stack)]
    return Mechanisms(
        [*reuse.candidates, *(candidate for other in others for candidate in other.candidates)],
        {**reuse.pairs, **{name: pair for other in others for name, pair in other.pairs.items()}},
        {name: reason for other in others for name, reason in other.missing.items()},
    )


def _reuse_pair(ours: Subject) -> Mechanisms:
    """With and without replaying checkpoint and prompt stages in every decision."""
    _require_equal_bits("reuse", _after(ours, ours.rebuild), _after(ours, ours.replay))
    return Mechanisms([Candidate("reuse_off", ours.rebuild, calls=FEW)], {"reuse": ("reuse_off", "replay")}, {})


def _overlap_pair(ours: Subject, pictures: list[Pixels], stack: ExitStack) -> Mechanisms:
    """Two policies of the same weights that differ in the setting of launch overlap."""
    own = ours.policy.config.overlap
    twin = with_overlap(ours.policy, not own, ours.device)
    other = Subject({**ours.settings, _OVERLAP: not own}, str(ours.device), pictures, policy=twin)
    _require_equal(_OVERLAP, ours, other, stack)
    names = ("other_overlap", "replay") if own else ("replay", "other_overlap")
    return Mechanisms([Candidate("other_overlap", other.replay, calls=SOME)], {_OVERLAP: names}, {})


def _windows_pair(ours: Subject, pictures: list[Pixels], stack: ExitStack) -> Mechanisms:
    """Whole calls of two sessions of one policy: windows that are uploaded, and windows that the GPU reads in place."""
    if ours.windows not in _OTHER_WINDOWS:
        return Mechanisms([], {}, {_MAPPED: f"windows are {ours.windows} memory on '{ours.device}'"})
    path = _OTHER_WINDOWS[WindowPath(ours.windows)]
    other = Subject(ours.settings, str(ours.device), pictures, policy=ours.policy, windows=path)
    _require_equal(_MAPPED, ours, other, stack)
    names = ("call", "other_windows") if path is WindowPath.MAPPED else ("other_windows", "call")
    return Mechanisms([Candidate("other_windows", other.decide, on_host=True, calls=SOME)], {_MAPPED: names}, {})


def _require_equal(mechanism: str, ours: Subject, other: Subject, stack: ExitStack) -> None:
    stack.callback(other.close)
    other.runner.session.fill("noise", ours.runner.session.read("noise"))
    _require_equal_bits(mechanism, _after(ours, ours.replay), _after(other, other.replay))


def _after(subject: Subject, call: Callable[[], object]) -> np.ndarray:
    call()
    return subject.actions()


def _require_equal_bits(mechanism: str, off: np.ndarray, on: np.ndarray) -> None:
    if not np.array_equal(off, on):
        worst = float(np.abs(off - on).max())
        raise MeasureError(f"'{mechanism}' off and on differ by up to {worst:.3g}; both must give equal bits")
