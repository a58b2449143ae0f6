"""A lifecycle node that says why a transition failed, refuses the invalid ones, and keeps answering meanwhile.

rclpy's own lifecycle node swallows the exceptions of a transition, lets an invalid request raise in the executor, and
runs a transition in the executor's thread, so that nothing else is answered while a checkpoint loads. Here each
transition runs in a thread of its own, one at a time, and its outcome is logged.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any

from lifecycle_msgs.srv import ChangeState
from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn
from rclpy.lifecycle.node import LifecycleNodeMixin
from rclpy.node import Node
from rclpy.task import Future


class GuardedLifecycleNode(LifecycleNode):  # type: ignore[misc]
    """Base of a lifecycle node. A subclass overrides `configuring`, `activating`, `deactivating` and `releasing`.

    An exception of `user_errors` is something that the user can mend: the transition fails with that one line in the
    log, and may be asked for again. Any other exception is a fault: it is logged with its traceback, everything is
    released, and the node is unconfigured. `releasing` must work from every state, half-built ones included, and return
    False if something would not stop in time; the node is then finalized and has to be started anew.
    """

    user_errors: tuple[type[Exception], ...] = ()

    def __init__(self, name: str, **options: Any) -> None:
        # LifecycleNode's own constructor offers no callback group; these are the two calls that it makes.
        Node.__init__(self, name, **options)
        LifecycleNodeMixin.__init__(self, callback_group=ReentrantCallbackGroup())
        self._rclpy_change_state = self._service_change_state.callback
        self._service_change_state.callback = self._serve_change_state
        self._transition_lock = threading.Lock()
        self._all_released = True

    # -- what a subclass does ------------------------------------------------------------------------------------

    def configuring(self) -> None:
        """Build everything. Whatever was built before an exception is given to `releasing`."""

    def activating(self) -> None:
        """Begin to work."""

    def deactivating(self) -> None:
        """Stop to work; return only when nothing works any more."""

    def releasing(self) -> bool:
        """Stop and free everything, in bounded time; False if something would not stop."""
        return True

    def transition_ended(self, label: str, succeeded: bool) -> None:
        """Called after every transition, in its thread."""

    # -- asking for transitions ----------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """Name of the lifecycle state, for example "inactive" or "configuring"."""
        return str(self._state_machine.current_state[1])

    @property
    def state_id(self) -> int:
        """Its number in lifecycle_msgs/State."""
        return int(self._state_machine.current_state[0])

    def transition(self, label: str, timeout: float = 0.0) -> bool:
        """Run a transition in this thread.

        Args:
            label: "configure", "activate", "deactivate", "cleanup" or "shutdown".
            timeout: longest wait for a transition that is under way (s).

        Returns:
            True if it succeeded; otherwise the log says why not.
        """
        request = ChangeState.Request()
        request.transition.label = label
        return bool(self._change_state(request, ChangeState.Response(), timeout).success)

    def transition_soon(self, *labels: str) -> None:
        """Run transitions in a thread of their own, one after the other, until one fails."""
        threading.Thread(target=self._run_all, args=(labels,), name="lifecycle", daemon=True).start()

    def shut_down(self, timeout: float) -> bool:
        """Bring the node to its end, from whatever state.

        Args:
            timeout: longest wait for a transition that is under way (s).

        Returns:
            False if that transition, or something that should have stopped, still runs.
        """
        if self.state != "finalized":
            self.transition("shutdown", timeout)
        return self.state == "finalized" and self._all_released

    def _run_all(self, labels: tuple[str, ...]) -> None:
        for label in labels:
            if not self.transition(label, timeout=60.0):
                return

    async def _serve_change_state(self, request: ChangeState.Request, response: ChangeState.Response) -> Any:
        """The service. Awaiting lets the executor go on with everything else."""
        answered = Future()

        def run() -> None:
            self._change_state(request, response, timeout=0.0)
            answered.set_result(None)
            self._wake_executor()

        threading.Thread(target=run, name="lifecycle", daemon=True).start()
        await answered
        return response

    def _change_state(self, request: ChangeState.Request, response: ChangeState.Response, timeout: float) -> Any:
        response.success = False
        wanted = request.transition.label or request.transition.id
        if not self._transition_lock.acquire(timeout=timeout):
            self.get_logger().warning(f"transition '{wanted}' refused: the node is {self.state} now; ask again later")
            return response
        try:
            label = self._allowed_label(request)
            if label:
                response = self._rclpy_change_state(request, response)
                self._report(label, response.success)
        except Exception:
            self.get_logger().error(f"transition '{wanted}' broke off:\n{traceback.format_exc()}")
        finally:
            self._transition_lock.release()
        return response

    def _allowed_label(self, request: ChangeState.Request) -> str:
        """Label of the transition that is asked for; empty, and logged, if this state has no such transition."""
        asked = request.transition
        possible = {int(t[0]): str(t[1]) for t in self._state_machine.available_transitions}
        for number, label in possible.items():
            if asked.label == label or (not asked.label and asked.id == number):
                return label
        known = ", ".join(sorted(set(possible.values()))) or "none"
        wanted = f"'{asked.label}'" if asked.label else f"number {asked.id}"
        self.get_logger().warning(f"transition {wanted} refused: the node is {self.state}; possible: {known}")
        return ""

    def _report(self, label: str, succeeded: bool) -> None:
        if succeeded:
            self.get_logger().info(f"{label}: done, the node is {self.state}")
        self.transition_ended(label, succeeded)

    # -- what rclpy calls ----------------------------------------------------------------------------------------

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Build; after a user's error everything is released again."""
        result = self._attempt("configure", self.configuring)
        return self._release("configure", result) if result is TransitionCallbackReturn.FAILURE else result

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Begin to work."""
        return self._attempt("activate", self.activating)

    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Stop to work."""
        return self._attempt("deactivate", self.deactivating)

    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Release everything."""
        return self._release("cleanup")

    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Release everything, from any state; the node is finalized in any case."""
        self._release("shutdown")
        return TransitionCallbackReturn.SUCCESS

    def on_error(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Release everything after a fault; unconfigured if that worked, finalized if not."""
        return self._release("error")

    def _attempt(self, label: str, action: Callable[[], None]) -> TransitionCallbackReturn:
        try:
            action()
        except self.user_errors as error:
            self.get_logger().error(f"{label} failed: {error}")
            return TransitionCallbackReturn.FAILURE
        except Exception:
            self.get_logger().error(f"{label} broke off, a fault of the node:\n{traceback.format_exc()}")
            return TransitionCallbackReturn.ERROR
        return TransitionCallbackReturn.SUCCESS

    def _release(
        self, label: str, result: TransitionCallbackReturn = TransitionCallbackReturn.SUCCESS
    ) -> TransitionCallbackReturn:
        """Release everything; `result` if that worked, otherwise an error."""
        try:
            self._all_released = self.releasing()
            if self._all_released:
                return result
            self.get_logger().fatal(f"{label}: something would not stop in time; start the node anew")
        except Exception:
            self.get_logger().error(f"{label} broke off, a fault of the node:\n{traceback.format_exc()}")
        return TransitionCallbackReturn.ERROR
