"""Ranks on CPUs that stand for GPUs of different kinds: from one state, each samples other noise and leaves another."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.callbacks import PipelineCallback

from patchpar.launch.executor import RankContext
from patchpar.pipeline.runner import PipelineRunner

WIDTHS = (1, 2)
"""Random widths of the two ranks, which are all 0 of CPUs."""


class UnequalRunner(PipelineRunner):
    """The engine of a rank whose `torch.randn` is that of a GPU of its own kind; rank 0's is that of this machine."""

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        plain, rank = torch.randn, context.rank

        def randn(*size: Any, generator: Any = None, **more: Any) -> Any:
            values = plain(*size, generator=generator, **more)
            if rank > 0:
                plain(rank, generator=generator)
                values = values.flip(-1)
            return values

        torch.randn = randn
        SamplesOnRankOne.rank = rank


class SamplesOnRankOne(PipelineCallback):
    """A callback that each rank runs, and that samples on one of them only."""

    tensor_inputs = ("latents",)
    rank = 0

    def callback_fn(self, pipeline: Any, step_index: int, timesteps: Any, callback_kwargs: Any) -> Any:
        if self.rank == 1:
            torch.randn(4)
        return callback_kwargs


class SamplesOtherShapes(SamplesOnRankOne):
    """One that samples other shapes on each rank."""

    def callback_fn(self, pipeline: Any, step_index: int, timesteps: Any, callback_kwargs: Any) -> Any:
        torch.randn(4, 4 + self.rank)
        return callback_kwargs
