"""Whole pipelines in pieces: what ranks of the pool run."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from patchpar.pipeline.messages import CallOptions, CallResult
from patchpar.plan.plan import Plan
from patchpar.shard.stages.stage_pass import StagePass
from tests import tiny
from tests.ranks import PoolRank

PLAN = Plan.parse("stage=2,strategy=piped:pieces=3")


def killed(this: PoolRank) -> None:
    """Rank 0 of two stages ends before it has sent its second piece."""
    pass_on = StagePass._pass_on

    def pass_on_or_end(stage: StagePass, *args: Any) -> None:
        if this.rank == 0 and stage._suffix == ", piece 1":
            stage._comm.beat("output of a block, piece 1")
            os.kill(os.getpid(), signal.SIGKILL)
        pass_on(stage, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StagePass, "_pass_on", pass_on_or_end)
        latents(this)


def latents(this: PoolRank) -> Any:
    """The latents of one call on the first rank. Needs all ranks of the pool."""
    built = tiny.build("flux")
    runner = this.runner()
    runner.adopt(built.pipe)
    result = runner.generate({**built.call_kwargs, "output_type": "latent"}, CallOptions(plan=PLAN, verify=False))
    runner.restore()
    return result.output if isinstance(result, CallResult) else None
