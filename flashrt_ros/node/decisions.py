"""One tick: observe, fill the windows, replay, check the whole chunk, and publish it or say why not."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..msg import Refusal as Cause
from ..policies import PolicyRunner, PromptError
from .chunk_checks import hold_chunk
from .chunk_gate import Chunk, ChunkGate, ChunkRefusal
from .epochs import ClockWatch, EpochCause, Epochs
from .observations import Observation, Observer
from .publishing import ChunkOrigin, ChunkPublisher
from .stall import StallAction, StallPolicy
from .streams import INSTRUCTION, StreamSet
from .tally import Tally

_NO_INSTRUCTION = "no instruction: publish one on the topic 'instruction', or set the parameter of that name"
_NO_CLOCK = "the node's clock stands at 0: use_sim_time is set, and nothing came on /clock"


@dataclass(frozen=True)
class Hooks:
    """What a tick needs of the node. `clock` is the node clock in ns; all of them may be called from the worker."""

    clock: Callable[[], int]
    clock_jumped: Callable[[], None]
    stop: Callable[[], None]
    log_error: Callable[[str], None]


class Decider:
    """Turns ticks into chunks. `tick` belongs to the worker's thread, everything else may be called from others.

    Args:
        runner: configured and warmed up.
        streams: of the node.
        observer: of the policy's streams.
        gate: what every chunk must pass.
        stall: what to do when chunks are refused again and again.
        epochs: of the node.
        publisher: of chunks.
        hooks: to the node.
        image_wait: longest wait for frames that came after the tick (s).
        session: name of the session that decides first.

    Attributes: `reason`, why the last tick published nothing, empty if it did; `fault`, true if that was the policy's
    doing and not that of its inputs; `instruction`, in force from the next decision on; `tally`;
    `streams`.
    """

    def __init__(
        self,
        runner: PolicyRunner,
        streams: StreamSet,
        observer: Observer,
        gate: ChunkGate,
        stall: StallPolicy,
        epochs: Epochs,
        publisher: ChunkPublisher,
        hooks: Hooks,
        image_wait: float,
        session: str,
    ) -> None:
        self.tally = Tally()
        self.stall = stall
        self.instruction = ""
        self.session = session
        self._continued: tuple[int, str] = (-1, "")
        self.reason = "the node is not active"
        self.fault = False
        self._runner = runner
        self.streams = streams
        self._observer = observer
        self._gate = gate
        self._epochs = epochs
        self._publisher = publisher
        self._hooks = hooks
        self._image_wait = image_wait
        self._clock_watch = ClockWatch()
        self._reset_due = True
        self._open = False

    @property
    def is_open(self) -> bool:
        """Whether ticks lead to decisions."""
        return self._open

    # -- from other threads ---------------------------------------------------------------------------------------

    def open(self) -> None:
        """Begin to decide on ticks; nothing that was observed before counts."""
        self.forget_observations()
        self.stall.reset()
        self.reason, self.fault = "no decision yet", False
        self._open = True

    def close(self, reason: str) -> None:
        """Decide no more. A decision in flight goes on: end its epoch, so that it is not published."""
        self._open = False
        self.reason, self.fault = reason, False
        self.streams.wake()

    def forget_observations(self) -> None:
        """Drop every message that came so far: at activation, and when the clock jumped back."""
        self._reset_due = True
        self.streams.drop()

    # -- in the worker, between two ticks --------------------------------------------------------------------------

    def continue_from(self, capsule: str, session: str, cause: EpochCause) -> int:
        """Go on as `session`, whose state was brought back from `capsule` (empty: from another session's live state).

        Returns the epoch that this begins. Its chunks name the capsule, and follow the instruction that came back.
        """
        self._observer.windows_changed()
        self.session = session
        self.instruction = self._runner.instruction
        epoch = self._epochs.begin(cause)
        self._continued = (epoch, capsule)
        return epoch

    # -- in the worker ---------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """One decision, or the reason why there is none. Never raises."""
        if not self._open or not self._still_open_after_wait():
            return
        try:
            self._decide()
        except Exception as error:
            self._broke_off(error)

    def _still_open_after_wait(self) -> bool:
        """Wait for frames that come after this tick, where that is asked for."""
        if self._image_wait:
            views, after_ns = self._runner.policy.views, time.monotonic_ns()
            self.streams.wait_newer(views, after_ns, self._image_wait, lambda: not self._open)
        return self._open

    def _decide(self) -> None:
        # In this order: if the instruction changes after its epoch was read, the result is one of an old epoch.
        epoch, instruction = self._epochs.current, self.instruction
        observation = self._observe()
        if isinstance(observation, str):
            self._without_observation(observation)
            return
        if not instruction.strip():
            self._without_observation(_NO_INSTRUCTION)
            return
        start_ns, steady_ns = self._hooks.clock(), time.monotonic_ns()
        capsule = self._continued[1] if self._continued[0] == epoch else ""
        origin = ChunkOrigin(
            self.session, capsule, epoch, instruction, observation.oldest_stamp_ns, start_ns, steady_ns
        )
        told = self.streams[INSTRUCTION].newest
        self._act(observation, origin)
        # Counted last, since everything before the chunk has left delays it.
        for name, received in observation.received.items():
            self.streams[name].mark_used(received, start_ns - observation.stamps_ns[name])
        if told is not None:
            self.streams[INSTRUCTION].mark_used(told)

    def _act(self, observation: Observation, origin: ChunkOrigin) -> None:
        """Replay, check and publish; every way out is counted."""
        try:
            actions = self._run(observation, origin.instruction)
        except PromptError as error:
            self.streams[INSTRUCTION].refuse(Cause.BAD_INSTRUCTION, str(error))
            return self._without_observation(f"instruction '{origin.instruction}': {error}")
        except Exception as error:
            self._broke_off(error)
            return self._stalling(origin, observation.measured)
        session_ns = time.monotonic_ns() - origin.start_steady_ns
        chunk = self._gate.judge(actions, observation.measured)
        refusal = chunk if isinstance(chunk, ChunkRefusal) else self._publish(chunk, origin)
        if refusal is None:
            return self._published(observation, session_ns)
        return self._refused(refusal, origin, observation.measured)

    def _observe(self) -> Observation | str:
        if self._reset_due:
            self._reset_due = False
            self._observer.reset()
            self._clock_watch.reset()
        now_ns = self._hooks.clock()
        if now_ns == 0:
            return _NO_CLOCK
        if self._clock_watch.jumped_back(now_ns):
            self._hooks.clock_jumped()
            return "the clock jumped back; waiting for new observations"
        return self._observer.look(now_ns, time.monotonic_ns())

    def _run(self, observation: Observation, instruction: str) -> Chunk:
        """Fill the windows and replay; float32[chunk, actions]."""
        runner = self._runner
        for view, frame in observation.frames.items():
            runner.set_image(view, frame.pixels, frame.order)
            self._observer.filled(view, observation.received[view])
        if observation.state is not None:
            runner.set_state(observation.state)
        runner.set_instruction(instruction)
        runner.session.notes["observation"] = str(observation.oldest_stamp_ns)
        decision = runner.decide()
        if observation.frames:
            self.tally.bytes_per_frame = decision.bytes_copied // len(observation.frames)
        # The engine replays what is stale before it hands out actions; this looks whether it did.
        session = runner.session
        self.tally.stale_replays += any(session.is_stale(stage.name) for stage in session.contract.order)
        return decision.actions

    def _publish(self, chunk: Chunk, origin: ChunkOrigin) -> ChunkRefusal | None:
        """Publish `chunk` unless it came too late for its last step, or for its epoch."""
        late_ns = self._hooks.clock() - self._publisher.valid_until_ns(origin, len(chunk))
        if late_ns > 0:
            text = f"ready {late_ns / 1e9:.3f} s after its last step was due; the policy is too slow for its chunk"
            return ChunkRefusal(Cause.EXPIRED, text)
        with self._epochs.publishing(origin.epoch) as chunk_id:
            if chunk_id is None:
                return ChunkRefusal(Cause.OLD_EPOCH, f"epoch {origin.epoch} ended while the chunk was computed")
            self._publisher.publish(chunk_id, chunk, origin)
        return None

    def _published(self, observation: Observation, session_ns: int) -> None:
        steady_ns = time.monotonic_ns()
        latency_ns = steady_ns - observation.newest_frame_ns(self._runner.policy.views)
        self.tally.count_published(steady_ns, latency_ns, session_ns)
        self.stall.published()
        self._note("")

    # -- what did not become a chunk --------------------------------------------------------------------------------

    def _refused(self, refusal: ChunkRefusal, origin: ChunkOrigin, measured: NDArray[np.float32] | None) -> None:
        self.tally.count_refusal(refusal.cause, refusal.text)
        if refusal.cause == Cause.OLD_EPOCH:
            return self._note(refusal.text)
        if self.reason != refusal.text:
            self._hooks.log_error(f"chunk dropped: {refusal.text}")
        self._note(refusal.text, fault=True)
        return self._stalling(origin, measured)

    def _broke_off(self, error: Exception) -> None:
        text = f"the decision broke off ({type(error).__name__}: {error}); the log has the traceback"
        self.tally.count_refusal(Cause.BROKE_OFF, text)
        if self.reason != text:
            self._hooks.log_error(f"{text}\n{traceback.format_exc()}")
        self._note(text, fault=True)

    def _without_observation(self, reason: str) -> None:
        self.tally.without_observation += 1
        self._note(reason)

    def _note(self, reason: str, fault: bool = False) -> None:
        """Remember why nothing was published; a node that was deactivated meanwhile has its own reason."""
        if self._open:
            self.reason, self.fault = reason, fault

    def _stalling(self, origin: ChunkOrigin, measured: NDArray[np.float32] | None) -> None:
        """Count one more decision without a chunk, and do what the stall policy asks for."""
        action = self.stall.refused()
        if action is StallAction.STOP:
            self._hooks.stop()
        elif action is StallAction.HOLD and measured is not None:
            origin = origin.again(self._hooks.clock(), time.monotonic_ns())
            if self._publish(hold_chunk(measured, self._gate.steps), origin) is None:
                self.tally.published += 1
