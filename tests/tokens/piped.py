"""Tiny pipelines under a plan, on ranks that are threads of this process: nothing to start, nothing to send."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.pipeline.installed_plan import InstalledPlan
from patchpar.pipeline.messages import CallOptions
from patchpar.pipeline.pipeline_call import PipelineCall
from patchpar.plan.mesh import Mesh
from patchpar.plan.plan import Plan
from patchpar.plan.step_clock import StepClock
from patchpar.shard.verification_cache import VerificationCache
from patchpar.strategies.cfg.split import guidance_of
from tests import tiny
from tests.contexts import ThreadContext
from tests.unit.threads import on_threads

from . import on_ranks

DEADLINE = 60.0


Builder = Callable[[str], tiny.Tiny]


def plain(name: str, build: Builder = tiny.build, **options: Any) -> Tensor:
    """The final latents in one piece."""
    found = build(name)
    return on_ranks.latents_of(found.pipe(**_arguments(found, options)))


def shared(
    name: str, plan: str, folder: Path, *, exchange: str = "on", build: Builder = tiny.build, **options: Any
) -> list[Tensor]:
    """The final latents on every rank of the plan, verified at first use. Raises the first rank's error."""
    wanted = Plan.parse(plan)
    found = [_own(build(name)) for _ in range(wanted.world_size)]  # threads share torch's random state

    def on_rank(transport: Any) -> Tensor:
        pipe, arguments = found[transport.rank].pipe, _arguments(found[transport.rank], options)
        clock, installed = StepClock(), InstalledPlan(pipe)
        mesh = Mesh(transport.rank, range(wanted.world_size), **wanted.degrees())
        verifications = VerificationCache(folder / str(transport.rank))
        installed.install_denoisers(
            wanted, mesh, Communicator(transport), clock, lambda: guidance_of(pipe, arguments), verifications
        )
        installed.control(exchange=exchange, vae="on")
        context: Any = ThreadContext()
        case = PipelineCall(pipe, context, clock, CallOptions(plan=wanted, quiet=True), installed.begin(tracing=False))
        try:
            with torch.no_grad():
                output = case.run(arguments)
            installed.finish()
        finally:
            installed.restore()
        return on_ranks.latents_of(output)

    generated = on_threads(wanted.world_size, on_rank, deadline=DEADLINE)
    for each in generated:
        if isinstance(each, Exception):
            raise each
    return generated


def _own(found: tiny.Tiny) -> tiny.Tiny:
    """With tokenizers of its own, which threads may not share."""
    for name, each in found.pipe.components.items():
        if name.startswith("tokenizer"):
            setattr(found.pipe, name, copy.deepcopy(each))
    return found


def _arguments(found: tiny.Tiny, options: dict[str, Any]) -> dict[str, Any]:
    return on_ranks.arguments(on_ranks.PipelineCase(name=found.name, plan="", options=options), found)
