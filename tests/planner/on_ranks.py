"""What the ranks of these tests run: a tiny pipeline under a plan, whose bytes are counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from patchpar.pipeline.messages import CallOptions, CallResult, RandomState
from patchpar.pipeline.planner.block_events import NotedBlocks
from patchpar.pipeline.rank_stats import RankStats
from patchpar.pipeline.runner import PipelineRunner
from patchpar.plan.plan import Plan
from patchpar.shard.stages import denoiser
from patchpar.shard.transformer.denoiser import TokenDenoiser
from patchpar.shard.transformer.token_plan_json import to_json
from tests import tiny
from tests.ranks import PoolRank

STEPS = 3
SEED = 7
FULL_TEXTS: dict[str, dict[str, Any]] = {"zimage": {"max_sequence_length": 32}}
"""Of a pipeline that cuts texts to their length and fills them up to a multiple of this, so that none is shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """The statistics of one rank in its second call, and the token plans by class of denoiser, as JSON.

    `encoded`: bytes that it sent, or received, of what encoders on one rank return.
    """

    stats: RankStats
    tokens: dict[str, str]
    encoded: int = 0


def call_of(name: str, steps: int = STEPS) -> dict[str, Any]:
    """The arguments of a call of a tiny pipeline."""
    return {**tiny.build(name).call_kwargs, **FULL_TEXTS.get(name, {}), "num_inference_steps": steps}


def noted_again(monkeypatch: pytest.MonkeyPatch, kind: type[NotedBlocks]) -> list[str]:
    """The paths of what recordings with this kind of noted blocks do not run, from now on."""
    paths: list[str] = []
    run = kind._again

    def noted(self: NotedBlocks, found: Any, path: str, *args: Any) -> Any:
        paths.append(path)
        return run(self, found, path, *args)

    monkeypatch.setattr(kind, "_again", noted)
    return paths


def counted(this: PoolRank, name: str, plans: list[str], vae: str = "auto") -> list[Counted | None]:
    """A call under each plan; None on ranks that it leaves idle. Needs all ranks of the pool.

    Stages are cut by counted work, as in a recording, which has no seconds: of blocks that take microseconds these
    change with what else runs on the machine.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(denoiser, "seconds_of_blocks", lambda plain, mesh: [])
        return _counted(this, name, plans, vae)


def _counted(this: PoolRank, name: str, plans: list[str], vae: str) -> list[Counted | None]:
    engine, built = this.runner(), tiny.build(name)
    engine.adopt(built.pipe)
    kwargs, found = call_of(name), list[Counted | None]()
    for plan in map(Plan.parse, plans):
        options = CallOptions(plan=plan, verify=False, vae=vae, random=RandomState(seed=SEED), quiet=True)
        engine.generate(kwargs, options)
        before = encoded_bytes(engine)
        last = engine.generate(kwargs, options)
        encoded = encoded_bytes(engine) - before
        tokens = {
            type(each.denoiser).__name__: to_json(each.plan)
            for each in engine._installed.patched
            if isinstance(each, TokenDenoiser) and each.plan is not None
        }
        is_used = isinstance(last, CallResult)
        found.append(Counted(stats=last.figures[0], tokens=tokens, encoded=encoded) if is_used else None)
    engine.restore()
    return found


def encoded_bytes(engine: PipelineRunner) -> int:
    """The bytes of values of encoders that this rank has sent, or received, so far."""
    if engine._encoders._one is None:
        return 0
    traffic = engine._encoders._one.transfer.comm.traffic
    return (traffic.bytes_sent + traffic.bytes_received)["encoders"]
