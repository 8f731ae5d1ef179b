"""Whole pipelines under a plan, each rank a thread of this process, and the memory of its tensors."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from patchpar.comm.collectives import Communicator
from patchpar.pipeline.installed_plan import InstalledPlan
from patchpar.pipeline.messages import CallOptions
from patchpar.pipeline.pipeline_call import PipelineCall
from patchpar.plan.mesh import Mesh
from patchpar.plan.plan import Plan
from patchpar.plan.step_clock import StepClock
from patchpar.shard.stages import block_seconds
from patchpar.strategies.cfg.split import guidance_of
from tests import tiny
from tests.contexts import ThreadContext
from tests.tokens.piped import _own
from tests.unit.threads import on_threads
from tests.vae.allocations import Allocations

DEADLINE = 60.0


class EvenTicks(threading.local):
    """Stands for `time`: by it each block takes as long, so that stages are cut alike however busy the machine is."""

    ticks = 0.0

    def perf_counter(self) -> float:
        self.ticks += 1
        return self.ticks


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBytes:
    """Of the second image on a rank: the most bytes of tensors that were made in it or before, and of stale values."""

    peak: int
    kept: int


def memory_of_ranks(name: str, plan: str, **arguments: Any) -> list[TensorBytes]:
    """What tensors take on each rank of a plan."""
    wanted = Plan.parse(plan)
    made = [_own(tiny.build(name)) for _ in range(wanted.world_size)]  # threads share torch's random state

    @torch.no_grad()
    def on_rank(transport: Any) -> TensorBytes:
        pipe, kwargs = made[transport.rank].pipe, {**made[transport.rank].call_kwargs, **arguments}
        pipe.set_progress_bar_config(disable=True)
        clock, installed = StepClock(), InstalledPlan(pipe)
        mesh = Mesh(transport.rank, range(wanted.world_size), **wanted.degrees())
        comm, vae_comm = Communicator(transport), Communicator(transport)
        installed.install_denoisers(wanted, mesh, comm, clock, lambda: guidance_of(pipe, kwargs), None)
        installed.install_vaes("auto", vae_comm, None)
        context: Any = ThreadContext()
        with Allocations() as found:
            for _ in range(2):
                found.peak = found.alive
                recorder = installed.begin(tracing=False)
                with installed.running():
                    PipelineCall(pipe, context, clock, CallOptions(plan=wanted, quiet=True), recorder).run(kwargs)
                recorder.end_image()
                installed.finish()
            peak = found.peak
        installed.restore()
        return TensorBytes(peak=peak, kept=recorder.figures(transport.rank, "cpu").stale_bytes)

    with mock.patch.object(block_seconds, "time", EvenTicks()):
        found = on_threads(wanted.world_size, on_rank, deadline=DEADLINE)
    for each in found:
        if isinstance(each, Exception):
            raise each
    return found
