"""How long a start takes, from a checkpoint on disk to the first actions: in processes of their own.

`python -m flashrt_ros.measure.pi05.starts DEVICE < settings.json` is one of them; it prints its times as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..circumstances import now, significant
from ..errors import MeasureError

MODULE = "flashrt_ros.measure.pi05.starts"
_LIMIT_S = 300.0  # of one start
_FRAME = (480, 640, 3)  # what the cameras show does not matter here


def starts(settings: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Two processes, one after the other, with caches of kernels that are empty at first.

    Returns:
        `first_action` and `second_start`: seconds from the beginning of loading to the first actions on the host;
        `second_start_with_imports`: from the start of the process to its end; `first_parts`, `second_parts`: what each
        of `subject.STARTS` took; `date` of the measurement.
    """
    with tempfile.TemporaryDirectory() as cache:
        first, second = (_start(settings, device, cache) for _ in range(2))
    return {
        "first_action": first["seconds"],
        "second_start": second["seconds"],
        "second_start_with_imports": second["process_s"],
        "first_parts": first["parts"],
        "second_parts": second["parts"],
        "date": now(),
    }


def caches_in(folder: str) -> dict[str, str]:
    """The environment that keeps in `folder` whatever is compiled: our own machine code, and the driver's cache, where
    NVRTC looks up what any process has compiled before.
    """
    return {"FLASHRT_CACHE": os.path.join(folder, "flashrt"), "CUDA_CACHE_PATH": os.path.join(folder, "driver")}


def _start(settings: Mapping[str, Any], device: str, cache: str) -> dict[str, Any]:
    environment = {**os.environ, **caches_in(cache)}
    command = [sys.executable, "-W", "ignore", "-m", MODULE, device]
    begin = time.perf_counter()
    try:
        done = subprocess.run(
            command, input=json.dumps(settings), env=environment, capture_output=True, text=True, timeout=_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        raise MeasureError(f"a start in a process of its own took more than {_LIMIT_S:g} s") from None
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise MeasureError(f"a start in a process of its own ended with code {done.returncode}: {reason}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "process_s": significant(time.perf_counter() - begin, 3)}


def main() -> None:
    """One start; its times go to standard output."""
    from .subject import Subject  # imports torch, which the process that only starts others need not wait for

    subject = Subject(json.load(sys.stdin), sys.argv[1], [np.full(_FRAME, 128, np.uint8)])
    parts = {name: significant(seconds, 3) for name, seconds in subject.start_s.items()}
    print(json.dumps({"seconds": significant(subject.first_action_s, 3), "parts": parts}))
    subject.close()


if __name__ == "__main__":
    main()
