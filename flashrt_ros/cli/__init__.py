"""The `flashrt` command: one module of this package is one subcommand.

A subcommand module has `NAME`, `HELP`, `add_arguments(parser)` and `run(args) -> exit code`. It imports what is heavy
inside `run`, so that `flashrt --help` is instant and works on a machine without torch's devices or ROS.
"""

from .main import main

__all__ = ["main"]
