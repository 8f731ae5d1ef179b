"""What the ranks of these tests run: a tiny denoiser under a strategy, evaluation by evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from patchpar.errors import PatchparError, PlanError
from patchpar.plan.step_clock import StepClock
from patchpar.shard.stale.cache import StaleBytes
from patchpar.shard.unet.denoiser import PatchedDenoiser
from patchpar.strategies import parse_strategy
from tests.exact import denoisers
from tests.ranks import PoolRank
from tests.stale.runs import Run, arguments, sites_of


def patched(this: PoolRank, run: Run, clock: StepClock) -> PatchedDenoiser:
    """The denoiser of a run in bands, over all ranks."""
    axis = this.mesh(patch=this.world)["patch"]
    found: PatchedDenoiser = parse_strategy(run.strategy).install(
        denoisers.build(run.denoiser), this.comm(), axis, clock=clock
    )
    found.exchange, found.sites = run.exchange, sites_of(run.denoiser)
    return found


def evaluate(bands: PatchedDenoiser, clock: StepClock, run: Run, evaluation: int) -> Tensor:
    """One denoiser call, and one step of the scheduler."""
    clock.next_call()
    prediction: Tensor = bands.denoise(bands.denoiser.forward, **arguments(run, evaluation))[0]
    clock.tick()
    return prediction


def image(bands: PatchedDenoiser, clock: StepClock, run: Run) -> list[Tensor]:
    """All evaluations of one image."""
    clock.reset()
    bands.reset()
    found = [evaluate(bands, clock, run, evaluation) for evaluation in range(run.evaluations)]
    bands.finish()
    return found


@torch.no_grad()
def predicted(this: PoolRank, runs: Sequence[Run]) -> list[list[Tensor]]:
    """Predictions of every run."""
    found = []
    for run in runs:
        clock = StepClock()
        found.append(image(patched(this, run, clock), clock, run))
    return found


@torch.no_grad()
def called_twice(this: PoolRank, run: Run, pauses: int) -> list[list[Tensor]]:
    """One call for each branch of guidance in every step; the second branch leaves the step `pauses` out."""
    clock, other = StepClock(), replace(run, branch=1)
    bands = patched(this, run, clock)
    found: list[list[Tensor]] = [[], []]
    for evaluation in range(run.evaluations):
        for branch, each in enumerate((run, other)):
            if branch == 0 or evaluation != pauses:
                clock.next_call()
                found[branch].append(bands.denoise(bands.denoiser.forward, **arguments(each, evaluation))[0])
        clock.tick()
    bands.finish()
    return found


@torch.no_grad()
def reported(this: PoolRank, run: Run) -> tuple[int, int]:
    """Bytes that the reports of an image say this rank has sent, and those counted, without the reports themselves."""
    clock, found = StepClock(), list[float]()
    bands = patched(this, run, clock)
    history, traffic = bands.history, bands.patch.comm.traffic
    assert history is not None
    receive = history.receive

    def noted(gathered: Sequence[Sequence[Tensor]], *, fresh: bool) -> None:
        found.append(float(gathered[this.rank][0][2]))
        receive(gathered, fresh=fresh)

    with patch.object(history, "receive", noted):
        image(bands, clock, run)
    reports = 3 * 4 * (this.world - 1) * len(found)
    return round(sum(found)), traffic.total_bytes - reports


@torch.no_grad()
def called_without_end(this: PoolRank, run: Run) -> tuple[int, str]:
    """How often the denoiser can be called without a step of the scheduler, and what is said then."""
    clock = StepClock()
    bands = patched(this, run, clock)
    for number in range(100):
        try:
            clock.next_call()
            bands.denoise(bands.denoiser.forward, **arguments(run, 0))
        except PatchparError as error:
            return number, f"{type(error).__name__}: {error}"
    return 100, "nothing"


@torch.no_grad()
def held(this: PoolRank, run: Run) -> tuple[list[set[int]], list[int]]:
    """After each evaluation of two images: where buffers of keys lie, and bytes held."""
    clock = StepClock()
    bands = patched(this, run, clock)
    where, num_bytes = [], []
    for _ in range(2):
        clock.reset()
        bands.reset()
        for evaluation in range(run.evaluations):
            evaluate(bands, clock, run, evaluation)
            assert bands.history is not None
            states = [slot.state for slot in bands.history.cache._call.entries.values() if slot.state is not None]
            where.append({x.data_ptr() for state in states for x in (*state.tensors(), *state.arriving())})
            num_bytes.append(bands.history.cache.num_bytes().total)
        bands.finish()
    return where, num_bytes


@torch.no_grad()
def interrupted(this: PoolRank, run: Run, layer: str) -> list[bool]:
    """A call that raises in the middle of the denoiser; whether each evaluation of the next image is as alone."""
    clock = StepClock()
    alone = image(patched(this, run, clock), clock, run)
    bands = patched(this, run, clock)
    clock.reset()
    evaluate(bands, clock, run, 3)
    evaluate(bands, clock, run, 4)

    def fail(*_: Any) -> None:
        raise ArithmeticError("not to be computed")

    hook = bands.denoiser.get_submodule(layer).register_forward_pre_hook(fail)
    with suppress(ArithmeticError):
        evaluate(bands, clock, run, 5)
        raise AssertionError("it was to fail")
    hook.remove()
    return [torch.equal(*each) for each in zip(image(bands, clock, run), alone, strict=True)]


@torch.no_grad()
def expected_and_held(this: PoolRank, run: Run) -> tuple[tuple[int, int], tuple[int, int]]:
    """Bytes held and arriving: as estimated before the first is stored, and as counted after the last evaluation."""
    checked: list[StaleBytes] = []
    clock = StepClock()
    bands = patched(this, run, clock)

    def noted(expected: StaleBytes, *_: object) -> None:
        checked.append(expected)

    where = "patchpar.shard.attention"
    with patch(f"{where}.stale.check_room", noted), patch(f"{where}.stale_partials.check_room", noted):
        for evaluation in range(run.evaluations):
            evaluate(bands, clock, run, evaluation)
    bands.finish()
    assert bands.history is not None
    (expected,) = checked
    return expected, bands.history.cache.num_bytes()


@torch.no_grad()
def refused(this: PoolRank, run: Run, free: int) -> str:
    """What is said where this much memory is free."""
    clock = StepClock()
    bands = patched(this, run, clock)
    with patch("patchpar.shard.stale.stale_layout.free_memory", lambda: free):
        try:
            evaluate(bands, clock, run, 0)
        except PlanError as error:
            return str(error)
    bands.finish()
    return "nothing"
