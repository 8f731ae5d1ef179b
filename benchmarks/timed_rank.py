"""Ranks of one thread each that meet before whatever is timed: what engines of several benchmarks have in common."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from patchpar.comm.collectives import AllGather, Communicator
from patchpar.comm.transport import connect
from patchpar.launch.executor import RankContext
from patchpar.plan.mesh import Mesh

MEET = "meet"
"""The kind of bytes and waits that belong to no step."""


class TimedRank:
    """One of the ranks of axis `patch`, all of a pool."""

    def __init__(self, context: RankContext) -> None:
        torch.set_num_threads(1)
        self.context = context
        self.comm = Communicator(connect(context), context.beat)
        self.axis = Mesh(context.rank, range(context.world_size), patch=context.world_size)["patch"]
        self._meet = AllGather(self.comm, self.axis, MEET, "meeting")

    def together(self, x: Tensor | None = None) -> list[Tensor]:
        """Wait until all ranks are here; return `x` of each, of one shape on all."""
        return list(self._meet.same(torch.zeros(1) if x is None else x))

    def timed(self, step: Callable[[], Any] | None) -> tuple[float, Any]:
        """Return the seconds of a step that all begin at once, and what it returns. A rank without one has no part."""
        self.together()
        start = time.perf_counter()
        output = None if step is None else step()
        return time.perf_counter() - start, output

    @property
    def sent(self) -> int:
        """Bytes that this rank has sent since its traffic was cleared."""
        return self.comm.traffic.total_bytes - self.comm.traffic.bytes_sent[MEET]

    @property
    def waited(self) -> float:
        """Seconds that it has waited for messages."""
        return sum(seconds for kind, seconds in self.comm.traffic.seconds_waited.items() if kind != MEET)


def relative_error(got: Sequence[Tensor], want: Sequence[Tensor] | None) -> float:
    """Return the error of a prediction, of any shape, relative to the plain one; 0 on a rank that has none."""
    return 0.0 if want is None else ((got[0] - want[0]).norm() / want[0].norm()).item()


def slower(of_ranks: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Return what rank 0 found, with the lists of these names turn by turn of the rank that has most."""
    return {**of_ranks[0], **{name: list(map(max, *(each[name] for each in of_ranks))) for name in names}}


def ratio_of(slow: Sequence[float], fast: Sequence[float]) -> float:
    """Return the median over the turns of how many times as fast."""
    return statistics.median(one / two for one, two in zip(slow, fast, strict=True))
