"""Tiny pipelines that draw more than they are made for, on ranks that are threads of this process."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.errors import ExchangeError
from patchpar.plan.mesh import Axis
from patchpar.plan.step_clock import StepClock
from patchpar.shard.verification_cache import VerificationCache
from patchpar.strategies.scheduler_step import sample_in
from patchpar.strategies.structure.denoiser import HighResDenoiser
from patchpar.strategies.structure.options import StructureGuidance
from tests.tiny import Tiny, build, latents
from tests.unit.threads import on_threads


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An image: of which pipeline, how, and with what arguments. `watched`: the ranks are told that somebody looks."""

    pipeline: str = "sd"
    options: dict[str, Any] = field(default_factory=dict)
    scheduler: Any = None
    steps: int = 3
    arguments: dict[str, Any] = field(default_factory=lambda: {"height": 128, "width": 128})
    exchange: str = "on"
    watched: bool = False

    @property
    def strategy(self) -> StructureGuidance:
        """With a native size of 64 pixels, and two of three steps in the first stage."""
        return StructureGuidance(**{"native": 64, "switch": 0.3} | self.options)


@dataclass(frozen=True, slots=True, kw_only=True)
class HighResOutput:
    """Final latents, and what this rank sent, by kind: in all, and up to the end of every step.

    `missing`: the share of latents that are no number after every step.
    """

    latents: Tensor
    bytes_sent: dict[str, int]
    by_step: list[dict[str, int]]
    missing: list[float]

    def sent_in(self, step: int) -> dict[str, int]:
        """In one step, counted from 0."""
        before = self.by_step[step - 1] if step else {}
        return {kind: count - before.get(kind, 0) for kind, count in self.by_step[step].items()}


@contextmanager
def large(
    tiny: Tiny,
    strategy: StructureGuidance,
    comm: Any,
    axis: Axis,
    by_step: list[dict[str, int]] | None = None,
    missing: list[float] | None = None,
    verifications: VerificationCache | None = None,
    *,
    watched: bool = False,
) -> Iterator[HighResDenoiser]:
    """The pipeline's denoiser answers out of patches while open, and its clock is that of its scheduler.

    `by_step` takes down what has been sent by the end of every step, `missing` the share of latents that are no number.
    `verifications`: of teams. `watched`: that somebody looks is said.
    """
    denoiser, scheduler, clock = tiny.denoiser, tiny.pipe.scheduler, StepClock()
    found = strategy.install(denoiser, comm, axis, pipe=tiny.pipe, clock=clock, verifications=verifications)
    plain = denoiser.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        clock.next_call()
        return found.denoise(plain, *args, **kwargs)

    found.expect({}, watched=watched)
    found.reset()
    original = scheduler.step

    @functools.wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        clock.tick()
        if by_step is not None and comm is not None:
            by_step.append(dict(comm.traffic.bytes_sent))
        if missing is not None:
            missing.append(float(sample_in(result).isnan().float().mean()))
        return result

    denoiser.forward, scheduler.step = forward, step
    with ExitStack() as stack:
        stack.callback(found.restore)
        try:
            yield found
        finally:
            del denoiser.forward, scheduler.step
        found.finish()


def prepared(case: Case) -> Tiny:
    """The pipeline of a case with its scheduler."""
    tiny = build(case.pipeline)
    parts = {name: part for name, part in tiny.pipe.components.items() if part and name.startswith("tokenizer")}
    tiny.pipe.register_modules(**{name: deepcopy(part) for name, part in parts.items()})  # a padding is set, then used
    if case.scheduler is not None:
        tiny.pipe.scheduler = case.scheduler.from_config(tiny.pipe.scheduler.config)
    return tiny


def generate(transport: Any, case: Case, tinies: list[Tiny]) -> HighResOutput:
    """On one rank; `transport` is None for a rank that is alone."""
    rank, by_step, missing = 0 if transport is None else transport.rank, list[dict[str, int]](), list[float]()
    comm = None if transport is None else Communicator(transport)
    axis = Axis("patch", rank, len(tinies), tuple(range(len(tinies))))
    with large(tinies[rank], case.strategy, comm, axis, by_step, missing, watched=case.watched) as found:
        found.exchange = case.exchange
        generated = latents(tinies[rank], steps=case.steps, **case.arguments)
    sent = {} if comm is None else dict(comm.traffic.bytes_sent)
    return HighResOutput(latents=generated, bytes_sent=sent, by_step=by_step, missing=missing)


def alone(case: Case) -> Tensor:
    """Final latents of one rank."""
    return generate(None, case, [prepared(case)]).latents


def together(case: Case, world: int) -> list[HighResOutput]:
    """What each of `world` ranks drew."""
    tinies = [prepared(case) for _ in range(world)]
    found = on_threads(world, generate, case, tinies, deadline=60.0)
    errors = [each for each in found if isinstance(each, Exception)]
    for each in sorted(errors, key=lambda error: isinstance(error, ExchangeError)):
        raise each  # others wait in vain for the rank that failed first
    return found


def plain(case: Case) -> Tensor:
    """Final latents of the pipeline as diffusers runs it."""
    return latents(prepared(case), steps=case.steps, **case.arguments)
