"""The process: one policy node, one executor, and an end in bounded time with code 0.

rclpy's own signal handlers invalidate the context under a running executor, which hangs or fails now and then. Here the
handlers only note that the end was asked for, and the executor is left between two callbacks.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .stop_signal import StopSignal

if TYPE_CHECKING:
    from .policy_node import PolicyNode

_SPIN_S = 0.1
# How long a thread may keep the interpreter's lock while another one wants it. Python's own 5 ms would delay a chunk
# that is ready by as much, whenever the executor is putting a status together.
_SWITCH_INTERVAL_S = 1e-3


def main(argv: Sequence[str] | None = None) -> int:
    """Run the node until SIGINT or SIGTERM; returns the exit code: 0, or 2 if it could not start."""
    stop = StopSignal()  # before anything slow is imported, so that an early Ctrl-C is no traceback
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        node = _start(list(sys.argv if argv is None else argv))
    except ImportError as error:
        return _cannot_start(f"{error}; install the package first (pip install . or colcon build)")
    except Exception as error:  # rclpy has no narrower type for a parameter file or an argument that it cannot read
        return _cannot_start(str(error))
    _spin(node, stop)
    return 0


def _start(argv: list[str]) -> PolicyNode:
    import rclpy
    from rclpy.signals import SignalHandlerOptions

    from .policy_node import PolicyNode

    rclpy.init(args=argv, signal_handler_options=SignalHandlerOptions.NO)
    return PolicyNode()


def _spin(node: PolicyNode, stop: StopSignal) -> None:
    """Serve the node until `stop`, then end it."""
    import rclpy
    from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor

    executor = SingleThreadedExecutor()
    executor.add_node(node)
    while not stop.is_set() and rclpy.ok():
        try:
            executor.spin_once(timeout_sec=_SPIN_S)
        except ExternalShutdownException:
            break
        except Exception:
            node.get_logger().error(f"a callback broke off, a fault of the node:\n{traceback.format_exc()}")
    if not node.end():
        _leave_running_work_behind()
    executor.shutdown()
    executor.remove_node(node)
    node.destroy_node()
    rclpy.try_shutdown()


def _leave_running_work_behind() -> None:
    """End the process although a thread hangs in a replay or in loading.

    The interpreter's own exit would wait for that thread, or crash in it.
    """
    print("policy_node: work in flight would not stop in time; leaving without it", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _cannot_start(reason: str) -> int:
    print(f"policy_node: cannot start: {reason}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
