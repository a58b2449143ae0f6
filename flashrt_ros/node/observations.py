"""What one decision may look at: the newest message of every stream if all may be used, else the reason why not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..msg import Refusal as Cause
from ..policies import Policy
from .cdr import CdrError, CompressedImageMessage, ImageMessage, JointStateMessage
from .frame import Frame, ImageError
from .freshness import Arrival, FreshnessGate, FreshnessLimits, Refusal
from .images import image_to_frame
from .joints import JointError, StateReader
from .streams import STATE, Message, Received, Stream


@dataclass(frozen=True)
class Observation:
    """Everything that one decision sees. `frames` has only the views whose window holds another frame until now."""

    frames: Mapping[str, Frame]
    received: Mapping[str, Received]
    stamps_ns: Mapping[str, int]
    state: NDArray[np.float32] | None
    measured: NDArray[np.float32] | None

    @property
    def oldest_stamp_ns(self) -> int:
        """Oldest header stamp of what was used (node clock)."""
        return min(self.stamps_ns.values())

    def newest_frame_ns(self, views: Sequence[str]) -> int:
        """Receipt of the newest frame, or of the newest message where the policy sees no views (steady clock)."""
        return max(self.received[name].steady_ns for name in views or self.received)


class Observer:
    """Judges and reads the streams of one policy. Belongs to the worker's thread.

    Args:
        streams: one a view, and `joint_states` if the policy or the checks need it.
        policy: whose views and state are read.
        limits: of age and skew.
        measured_names: joints whose measured positions the checks need; empty if none.
    """

    def __init__(
        self, streams: Mapping[str, Stream], policy: Policy, limits: FreshnessLimits, measured_names: Sequence[str]
    ) -> None:
        self._streams = streams
        self._views = tuple(policy.views)
        self._capacity = policy.max_pixels * 4
        self._gate = FreshnessGate({name: stream.description for name, stream in streams.items()}, self._views, limits)
        owner = f"policy '{policy.name}'"
        self._state = StateReader(policy.state_names, owner) if policy.state_names else None
        self._measured = StateReader(measured_names, "the check of the chunks") if measured_names else None
        # The usual case, in which each joint state is read once.
        self._same_joints = tuple(measured_names) == tuple(policy.state_names)
        self._parsed: dict[str, tuple[Received, Message]] = {}
        self._in_window: dict[str, Received] = {}
        self._refused: set[str] = set()

    def reset(self) -> None:
        """Forget accepted stamps, and that any window holds a usable frame."""
        self._gate.reset()
        self._in_window.clear()
        self._parsed.clear()

    def windows_changed(self) -> None:
        """The windows, or what was computed from them, may be of other frames: the newest ones must be copied again."""
        self._in_window.clear()

    def filled(self, view: str, received: Received) -> None:
        """The window of `view` now holds the frame of `received`."""
        self._in_window[view] = received

    def look(self, now_ns: int, steady_ns: int) -> Observation | str:
        """Judge every stream now.

        Args:
            now_ns: node clock.
            steady_ns: steady clock.

        Returns:
            The observation, or why there is none. Refusals were counted on their streams.
        """
        self._refused.clear()
        try:
            return self._look(now_ns, steady_ns)
        finally:
            for name, stream in self._streams.items():
                if name not in self._refused:
                    stream.last_refusal = None

    def _look(self, now_ns: int, steady_ns: int) -> Observation | str:
        newest = {name: stream.newest for name, stream in self._streams.items()}
        malformed = [text for name, got in newest.items() if got is not None and (text := self._parse(name, got))]
        if malformed:
            return "; ".join(malformed)
        arrivals = {name: self._arrival(name) if got else None for name, got in newest.items()}
        publishers = {name: self._streams[name].publishers for name, got in newest.items() if got is None}
        refusals = self._gate.check(arrivals, now_ns, steady_ns, publishers)
        if refusals:
            return "; ".join(self._count(refusal) for refusal in refusals)
        received = {name: got for name, got in newest.items() if got is not None}
        stamps = {name: arrival.stamp_ns for name, arrival in arrivals.items() if arrival is not None}
        try:
            frames = {
                view: self._frame(view) for view in self._views if received[view] is not self._in_window.get(view)
            }
            state = self._read(self._state)
            measured = state if self._same_joints else self._read(self._measured)
            return Observation(frames, received, stamps, state, measured)
        except _Refused as refused:
            return str(refused)

    def _parse(self, name: str, received: Received) -> str:
        """Parse a new message once; the reason if it is none."""
        before = self._parsed.get(name)
        if before is not None and before[0] is received:
            return ""
        stream = self._streams[name]
        try:
            self._parsed[name] = (received, stream.kind.parse(received.raw))
        except CdrError as error:
            return str(self._refuse(name, Cause.MALFORMED, f"{stream.description}: {error}"))
        return ""

    def _arrival(self, name: str) -> Arrival:
        received, message = self._parsed[name]
        assert isinstance(message, ImageMessage | CompressedImageMessage | JointStateMessage)
        return Arrival(message.header.stamp_ns, received.steady_ns)

    def _count(self, refusal: Refusal) -> str:
        """Count a refusal on the streams that it concerns. flashrt_ros/Refusal has the numbers of `Reason`."""
        for name, stream in self._streams.items():
            if stream.description in refusal.stream:  # a skew names two
                self._refuse(name, int(refusal.reason), refusal.text)
        return refusal.text

    def _frame(self, view: str) -> Frame:
        message = self._parsed[view][1]
        assert isinstance(message, ImageMessage | CompressedImageMessage)
        try:
            frame = image_to_frame(message, self._capacity)
            height, width = frame.pixels.shape[:2]
            if height * width * 4 > self._capacity:
                raise ImageError(
                    f"{width}x{height} is more than the {self._capacity // 4} pixels of its window; lower the camera's "
                    "resolution or raise policy.max_pixels"
                )
            return frame
        except ImageError as error:
            text = f"{self._streams[view].description}: {error}"
            raise self._refuse(view, Cause.BAD_IMAGE, text) from error

    def _read(self, reader: StateReader | None) -> NDArray[np.float32] | None:
        if reader is None:
            return None
        message = self._parsed[STATE][1]
        assert isinstance(message, JointStateMessage)
        try:
            return reader.read(message.names, message.position)
        except JointError as error:
            text = f"{self._streams[STATE].description}: {error}"
            raise self._refuse(STATE, Cause.BAD_JOINT_STATE, text) from error

    def _refuse(self, name: str, cause: int, text: str) -> _Refused:
        self._refused.add(name)
        self._streams[name].refuse(cause, text)
        return _Refused(text)


class _Refused(Exception):  # noqa: N818 (control flow within this module, never seen outside)
    """A stream was refused, and that was counted."""
