"""What the ranks of the overlap test run."""

from __future__ import annotations

import math
from typing import Any

from benchmarks.overlap.ranks import Steps
from tests.ranks import PoolRank

STEPS = 2


def waited(this: PoolRank, strategy: str, latency: float, load: float) -> dict[str, Any]:
    """Seconds that a step's seams waited on a link of `latency` that is busy for `load` of the step; its exchanges."""
    steps = Steps(this.transport)
    steps.prepare(strategy, "sleeping")
    seen = steps.record()
    rate = sum(num_bytes for *_, num_bytes, _ in seen["messages"]) / (load * seen["seconds"]) if load else math.inf
    steps.measure((latency, rate, 0), 1, 0)
    steps.comm.traffic.clear()
    steps.measure((latency, rate, 0), 0, STEPS)
    by_kind = dict(steps.comm.traffic.seconds_waited)
    steps.release()
    return {"seams": sum(by_kind.values()) / STEPS, "rate": rate, **seen}
