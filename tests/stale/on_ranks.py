"""What the ranks of these tests run: a tiny denoiser under a strategy, evaluation by evaluation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from patchpar.clock import StepClock
from patchpar.patched import PatchedDenoiser
from patchpar.strategies import parse_strategy
from tests.exact import denoisers
from tests.ranks import Place
from tests.stale.runs import Run, arguments, sites_of


def patched(place: Place, run: Run, clock: StepClock) -> PatchedDenoiser:
    """The denoiser of a run in bands, over all ranks."""
    axis = place.mesh(patch=place.world)["patch"]
    found: PatchedDenoiser = parse_strategy(run.strategy).install(
        denoisers.build(run.denoiser), place.door(), axis, clock=clock
    )
    found.exchange, found.sites = run.exchange, sites_of(run.denoiser)
    return found


def evaluate(bands: PatchedDenoiser, clock: StepClock, run: Run, evaluation: int) -> Tensor:
    """One denoiser call, and one step of the scheduler."""
    clock.next_call()
    prediction: Tensor = bands.denoise(bands.denoiser.forward, **arguments(run, evaluation))[0]
    clock.tick()
    return prediction


def picture(bands: PatchedDenoiser, clock: StepClock, run: Run) -> list[Tensor]:
    """All evaluations of one picture."""
    clock.reset()
    bands.reset()
    found = [evaluate(bands, clock, run, evaluation) for evaluation in range(run.evaluations)]
    bands.finish()
    return found


@torch.no_grad()
def predicted(place: Place, runs: Sequence[Run]) -> list[list[Tensor]]:
    """Predictions of every run."""
    found = []
    for run in runs:
        clock = StepClock()
        found.append(picture(patched(place, run, clock), clock, run))
    return found
