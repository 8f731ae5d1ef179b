"""Base classes of the runners of all streams: a rank's device, its transport, and its part of a plan."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from patchpar.comm.collectives import Communicator
from patchpar.comm.transport import Transport, connect, watched
from patchpar.launch.executor import IdleRank, InteractiveRankContext
from patchpar.models.quiet_libraries import silence_libraries
from patchpar.stream.messages import ModelFacts, StreamRun
from patchpar.stream.plan import StageSteps, StreamPlan
from patchpar.stream.stage import StageStats

THROUGH = "shared_memory"
"""Ranks are workers of one host. Not NCCL, which orders all messages of a rank: a receive that is posted in advance
would block the sends after it."""


class RankRunner:
    """One rank of a stream."""

    def __init__(self, context: InteractiveRankContext) -> None:
        self._context = context
        self._device = torch.device(context.device)
        self._transport: Transport | None = None
        self._pipe: Any = None
        if context.world_size > 1:  # before a model arrives: unpickling it imports libraries that log
            silence_libraries()

    def _connect(self) -> Transport | None:
        """The transport to the other ranks, made once; None on a single rank."""
        if self._context.world_size > 1 and self._transport is None:
            with self._context.waiting:
                self._transport = connect(self._context, through=THROUGH)
        return self._transport

    def _watched(self) -> Transport | None:
        """The transport with the deadline of the current call."""
        return None if self._transport is None else watched(self._transport, self._context)


class StageRunner(RankRunner):
    """One rank of a video stream: loads the parts that its stage needs, and runs its stage until the stream ends."""

    _comm: Communicator | None = None
    _plan: StreamPlan

    def load(
        self, folder: str, config: Any, plan: StreamPlan, options: Mapping[str, Any]
    ) -> ModelFacts | IdleRank | None:
        """Load the parts that this rank's stage needs from a pipeline's folder. Only rank 0 returns facts.

        `config`: StreamConfig or FifoConfig. `options`: of diffusers' from_pretrained. Raises UnsupportedModel,
        PlanError.
        """
        self._config, self._plan = config, plan
        transport = self._connect()
        if transport is not None and self._comm is None:
            self._comm = Communicator(transport, self._context.beat)
        rank = self._context.rank
        if rank >= plan.ranks:
            return IdleRank()
        facts = self._load_stage(Path(folder), plan.stages[plan.stage_of(rank)], options)
        return facts if rank == 0 else None

    def run(self, run: StreamRun) -> StageStats | IdleRank:
        """Run this rank's stage until the stream ends. Raises ExchangeError if another rank is late or has died."""
        if self._context.rank >= self._plan.ranks:
            return IdleRank()
        self._watched()
        return self._run_stage(run)

    def _to_device(self, *networks: Any) -> None:
        for network in networks:
            if network is not None:
                network.to(self._device)

    def _load_stage(self, folder: Path, stage: StageSteps, options: Mapping[str, Any]) -> ModelFacts | None:
        raise NotImplementedError

    def _run_stage(self, run: Any) -> StageStats:
        raise NotImplementedError
