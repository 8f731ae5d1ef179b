"""What runs on the ranks of the tests' worker pool: any test function, on the first so many ranks.

A test writes `ranks.run("tests.guidance.on_ranks:prediction", 2, "sdxl")`; each of ranks 0 and 1 then calls
`prediction(this, "sdxl")`, where `this` says who it is and opens the way to the others.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from patchpar.comm.collectives import Communicator
from patchpar.comm.transport import Transport, alone, connect
from patchpar.launch.executor import RankContext
from patchpar.pipeline.runner import PipelineRunner
from patchpar.plan.mesh import Mesh

DEADLINE = 30.0
"""Seconds for any wait of one rank for another. The slowest step of a tiny pipeline takes well under one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRank:
    """One rank of the `world` ranks that take part in a test."""

    rank: int
    world: int
    context: RankContext
    transport: Transport
    kept: list[PipelineRunner] = field(default_factory=list)

    def mesh(self, **degrees: int) -> Mesh:
        """Named axes over all that take part, e.g. `mesh(cfg=2, patch=2)`."""
        return Mesh(self.rank, range(self.world), **degrees)

    def comm(self) -> Communicator:
        """A way out that counts from zero."""
        return Communicator(self.transport)

    def runner(self) -> PipelineRunner:
        """What runs pipelines on a worker. It is kept until the next test: others may still wait for its messages."""
        self.kept.append(PipelineRunner(self.context))
        return self.kept[-1]


class Ranks:
    """The engine of the test pool."""

    def __init__(self, context: RankContext) -> None:
        torch.set_num_threads(1)
        self._context = context
        self._kept: list[PipelineRunner] = []

    def form_group(self, path: str) -> None:
        """What `through="torch"` needs."""
        form_group(self._context, path)

    def run(self, function: str, world: int, through: str, args: tuple[Any, ...]) -> Any:
        """Call "module:function" on the first `world` ranks; the others return None.

        Every call gets lines of its own, so that messages a failed test left unread cannot reach the next one.
        """
        transport = connect(self._context, through=through)
        transport.deadline = DEADLINE
        if through == "torch":
            dist.barrier()  # gloo's links to a rank that closes its own at once may not be made yet
        try:
            if self._context.rank >= world:
                return None
            self._kept = []
            this = PoolRank(
                rank=self._context.rank, world=world, context=self._context, transport=transport, kept=self._kept
            )
            return _resolve(function)(this, *args)
        finally:
            transport.close()

    def alone(self, function: str, args: tuple[Any, ...]) -> Any:
        """Call "module:function" on this rank, which exchanges nothing: other ranks may do something else."""
        transport = alone(self._context)
        this = PoolRank(rank=self._context.rank, world=1, context=self._context, transport=transport)
        return _resolve(function)(this, *args)


def form_group(context: RankContext, path: str) -> None:
    """Make torch's default group over gloo: patchpar's own workers have none. `path`: a new file for the meeting."""
    if not dist.is_initialized():
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = dist.FileStore(path, context.world_size)  # type: ignore[attr-defined]  # it is documented
        dist.init_process_group("gloo", store=store, rank=context.rank, world_size=context.world_size)


def _resolve(function: str) -> Callable[..., Any]:
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)
