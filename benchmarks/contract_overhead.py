"""What the contract costs: `act()` with nothing stale, and with empty stages that are all replayed.

Run: `python benchmarks/contract_overhead.py` (writes benchmarks/results/contract_overhead.json).
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
import torch
from _common import percentiles, write_result

from flashrt_ros.contract import Buffer, Contract, DType, Identity, Rate, Region, Role, Stage, Variant
from flashrt_ros.engine import Session

STAGES = 4
CALLS = 20_000


def empty(buffers: Mapping[str, torch.Tensor], variant: Variant) -> None:
    """A stage that does nothing, so that only the engine's own work is timed."""


def make_session() -> Session:
    """A chain of empty stages behind one window."""
    buffers = [Buffer("window", (1,), DType.FLOAT32, Role.SWAP, Rate.OBSERVATION)]
    buffers += [Buffer(f"b{i}", (1,), DType.FLOAT32, Role.STATE) for i in range(STAGES)]
    regions = [Region(f"r{i}", f"b{i}", 0, 4) for i in range(STAGES)]
    reads = ["window", *(f"b{i}" for i in range(STAGES - 1))]
    stages = [Stage(f"s{i}", Rate.OBSERVATION, (reads[i],), (f"b{i}",)) for i in range(STAGES)]
    contract = Contract("chain", tuple(buffers), tuple(stages), Identity("empty", ""), tuple(regions))
    session = Session(contract, {stage.name: empty for stage in stages})
    session.configure()
    session.fill("window", np.zeros(1, np.float32))
    session.act()
    return session


def time_act(session: Session, *, refill: bool) -> list[float]:
    """Microseconds of each `act()`; with `refill`, every stage is stale each time (the fill is not timed)."""
    value, times = np.zeros(1, np.float32), []
    for _ in range(CALLS):
        if refill:
            session.fill("window", value)
        start = time.perf_counter_ns()
        session.act()
        times.append((time.perf_counter_ns() - start) / 1e3)
    return times


def main() -> None:
    """Time both cases and write the result."""
    session = make_session()
    for refill in (False, True):
        time_act(session, refill=refill)
    result = {
        "stages": STAGES,
        "calls": CALLS,
        "act_us_nothing_stale": percentiles(time_act(session, refill=False)),
        "act_us_all_stale": percentiles(time_act(session, refill=True)),
    }
    write_result("contract_overhead", result, protocol=f"{CALLS} calls a case after as many warm-up calls")


if __name__ == "__main__":
    main()
