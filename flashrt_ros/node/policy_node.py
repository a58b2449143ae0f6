"""The lifecycle node: from cameras, joint states and an instruction to action chunks."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol, TypeVar

from rclpy.clock import Clock, ClockType, JumpThreshold
from rclpy.duration import Duration
from rclpy.timer import Timer

from ..engine import DeviceError, SessionManager
from ..msg import Refusal
from ..policies import Policy, PolicyError, PolicyRunner
from .building import build_runner, capsule_folder, chunk_gate, freshness_limits, measured_joints
from .capsule_desk import CapsuleDesk
from .cdr import CdrError, parse_string
from .chunk_gate import ChunkGate
from .decisions import Decider, Hooks
from .epochs import EpochCause, Epochs
from .joints import JointError
from .lifecycle import GuardedLifecycleNode
from .observations import Observer
from .parameter_server import ParameterServer
from .parameters import ParameterError, Settings
from .publishing import ChunkPublisher
from .services import CapsuleServices
from .stall import StallAction, StallPolicy
from .status import StatusPublisher, Subject
from .streams import COMPRESSED_IMAGE, IMAGE, INSTRUCTION, JOINT_STATE, STATE, TEXT, Received, StreamSet
from .ticks import TickCounter
from .worker import Worker


class Closable(Protocol):
    """Something that release has to close."""

    def close(self) -> None:
        """Leave the graph."""


Part = TypeVar("Part", bound=Closable)

SESSION = "main"
"""Name of the session that decides first."""


class PolicyNode(GuardedLifecycleNode):
    """One policy in the ROS graph. Parameters: `parameters.PARAMETERS`; topics and services: the README.

    Args:
        name: of the node, unless it is remapped.
        options: as of `rclpy.node.Node`.
    """

    user_errors = (ParameterError, PolicyError, JointError, DeviceError)

    def __init__(self, name: str = "policy", **options: Any) -> None:
        super().__init__(name, allow_undeclared_parameters=True, **options)
        self._parameter_server = ParameterServer(self, locked=lambda: self.state not in ("unconfigured", "finalized"))
        self._steady = Clock(clock_type=ClockType.STEADY_TIME)
        self._epochs = Epochs()
        self._built = ExitStack()
        self._worker: Worker | None = None
        self._decider: Decider | None = None
        self._status: StatusPublisher | None = None
        self._tick_timer: Timer | None = None
        self._ticks = TickCounter(1)
        self._stop_timeout = 5.0
        backwards = JumpThreshold(min_forward=None, min_backward=Duration(nanoseconds=-1), on_clock_change=True)
        self._jump_handle = self.get_clock().create_jump_callback(
            backwards, post_callback=lambda _: self._clock_jumped()
        )
        if self._parameter_server.autostart:
            self._autostart_timer = self.create_timer(0.0, self._autostart, clock=self._steady)

    # -- transitions -----------------------------------------------------------------------------------------------

    def configuring(self) -> None:
        """Validate, load, capture, warm up, and only then appear in the graph."""
        settings = self._parameter_server.settings()
        self._stop_timeout = settings.stop_timeout
        self._built = ExitStack()
        worker = self._start_worker()
        runner = worker.call(lambda: build_runner(settings))
        self._built.callback(lambda: worker.call(runner.close, self._stop_timeout))
        gate = chunk_gate(settings, runner.policy)
        streams = self._subscribe(settings, runner.policy, gate)
        decider = self._make_decider(settings, runner, gate, streams)
        decider.instruction = settings.instruction
        self._decider = decider
        early = streams[INSTRUCTION].newest
        if early is not None:  # it came between the subscription and this line, when nobody could take it
            self._on_instruction(early)
        desk = self._capsule_desk(settings, runner, decider, worker)
        self._keep(CapsuleServices(self, desk, settings.capsules.timeout))
        counts = runner.session.counts.copy()
        subject = Subject(settings, runner, streams, decider, worker, self._epochs, desk, counts)
        self._status = self._keep(StatusPublisher(self, subject))
        self._start_timer(settings.status_period, self._publish_status)
        # Made once and paused, because activation must be quick.
        self._ticks = TickCounter(round(1e9 / settings.rate_hz))
        self._tick_timer = self._start_timer(1 / settings.rate_hz, self._tick)
        self._tick_timer.cancel()

    def activating(self) -> None:
        """Begin a new epoch with new observations."""
        assert self._decider is not None
        assert self._tick_timer is not None
        self._epochs.begin(EpochCause.ACTIVATION)
        self._decider.open()
        self._ticks.restart(time.monotonic_ns())
        self._tick_timer.reset()

    def deactivating(self) -> None:
        """Close the gate, then wait for the decision in flight; its chunk is not published."""
        reason = "the node is not active; activate it"
        if self._decider is not None and self._decider.stall.stalled:
            reason = f"{reason}; before that, chunks were refused again and again: {self._decider.reason}"
        if not self._stop_deciding(reason):
            raise TimeoutError(f"the decision in flight did not end within stop_timeout, {self._stop_timeout:g} s")

    def releasing(self) -> bool:
        """Free everything that was built, the latest first."""
        settled = self._stop_deciding("the node is shutting down")
        self._decider = self._status = self._tick_timer = None
        if settled:
            self._built.close()
        self._built = ExitStack()
        worker, self._worker = self._worker, None
        if worker is None:
            return True
        stopped = worker.stop(self._stop_timeout if settled else 0.0)
        del worker
        gc.collect()  # a model's tensors sit in reference cycles, and its memory is wanted back now
        return settled and stopped

    def transition_ended(self, label: str, succeeded: bool) -> None:
        """Tell the graph at once."""
        self._publish_status()

    def end(self) -> bool:
        """Shut down in bounded time, from whatever state; False if something still runs."""
        return self.shut_down(self._stop_timeout)

    def destroy_node(self) -> None:
        """Stop and free everything, then leave the graph."""
        self.releasing()
        self._jump_handle.unregister()
        super().destroy_node()

    def _stop_deciding(self, reason: str) -> bool:
        """Let no further chunk out; False if a decision still runs after the bounded wait."""
        if self._tick_timer is not None:
            self._tick_timer.cancel()
        if self._decider is not None and self._decider.is_open:
            self._decider.close(reason)
            self._epochs.begin(EpochCause.DEACTIVATION)
        return self._worker is None or self._worker.settle(self._stop_timeout)

    # -- building --------------------------------------------------------------------------------------------------

    def _start_worker(self) -> Worker:
        def tick() -> None:
            decider = self._decider
            if decider is not None:
                decider.tick()

        self._worker = Worker(tick, "session")
        return self._worker

    def _subscribe(self, settings: Settings, policy: Policy, gate: ChunkGate) -> StreamSet:
        streams = self._keep(StreamSet(self))
        for view in policy.views:
            chosen = settings.view(view)
            streams.add(view, chosen.topic, COMPRESSED_IMAGE if chosen.compressed else IMAGE)
        if policy.state_names or measured_joints(settings, gate):
            streams.add(STATE, STATE, JOINT_STATE)
        streams.add(INSTRUCTION, INSTRUCTION, TEXT, self._on_instruction)
        return streams

    def _make_decider(self, settings: Settings, runner: PolicyRunner, gate: ChunkGate, streams: StreamSet) -> Decider:
        policy = runner.policy
        observed = {stream.name: stream for stream in streams if stream.name != INSTRUCTION}
        observer = Observer(observed, policy, freshness_limits(settings), measured_joints(settings, gate))
        publisher = self._keep(
            ChunkPublisher(self, gate.limits.joint_names, policy.action_dt, runner.session.fingerprint)
        )
        hooks = Hooks(
            clock=lambda: int(self.get_clock().now().nanoseconds),
            clock_jumped=self._clock_jumped,
            stop=lambda: self.transition_soon("deactivate"),
            log_error=self.get_logger().error,
        )
        stall = StallPolicy(StallAction(settings.stall_policy), settings.stall_after)
        return Decider(
            runner, streams, observer, gate, stall, self._epochs, publisher, hooks, settings.image_wait, SESSION
        )

    def _capsule_desk(self, settings: Settings, runner: PolicyRunner, decider: Decider, worker: Worker) -> CapsuleDesk:
        wanted = settings.capsules
        manager = worker.call(lambda: SessionManager(runner.session, first=SESSION, capacity=wanted.sessions))

        def clock() -> int:
            return int(self.get_clock().now().nanoseconds)

        folder = capsule_folder(settings)
        return CapsuleDesk(runner, manager, folder, decider, self._epochs, worker, wanted.timeout, clock)

    def _keep(self, part: Part) -> Part:
        """Remember to close `part` at release."""
        self._built.callback(part.close)
        return part

    def _start_timer(self, period: float, callback: Callable[[], Any]) -> Timer:
        timer = self.create_timer(period, callback, clock=self._steady)
        self._built.callback(self.destroy_timer, timer)
        return timer

    def _tick(self) -> None:
        """Ask for a decision; the ticks that the timer left out because it was served late count as skipped."""
        worker = self._worker
        if worker is not None:
            worker.skip(self._ticks.missed(time.monotonic_ns()))
            worker.tick()

    # -- events ----------------------------------------------------------------------------------------------------

    def _autostart(self) -> None:
        self.destroy_timer(self._autostart_timer)
        self.transition_soon("configure", "activate")

    def _on_instruction(self, received: Received) -> None:
        """A new text begins a new epoch; the same one again changes nothing."""
        decider = self._decider
        if decider is None:
            return
        stream = decider.streams[INSTRUCTION]
        try:
            message = parse_string(received.raw)
        except CdrError as error:
            stream.refuse(Refusal.MALFORMED, f"{stream.description}: {error}")
            return
        stream.last_refusal = None
        if message.data != decider.instruction:
            # Before the epoch begins, so that no decision of the new epoch sees the old text.
            decider.instruction = message.data
            self._epochs.begin(EpochCause.INSTRUCTION)

    def _publish_status(self) -> None:
        status = self._status
        if status is None:
            return
        try:
            status.publish()
        except Exception:  # in the executor's thread it would end the process
            if self._status is status:
                self.get_logger().error(f"the status could not be published:\n{traceback.format_exc()}")

    def _clock_jumped(self) -> None:
        """What was observed or is being computed belongs to a time that has not come yet."""
        decider = self._decider
        if decider is not None and decider.is_open:
            self.get_logger().warning("the node's clock jumped back: a new epoch begins, old observations are dropped")
            decider.forget_observations()
            self._epochs.begin(EpochCause.CLOCK_JUMP)
