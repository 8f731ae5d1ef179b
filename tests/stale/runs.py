"""Runs of a tiny denoiser under a strategy, evaluation by evaluation, and what the emulation says they predict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.emulation import EmulatedPolicy, Emulation
from patchpar.shard.unet.discover import ExchangeSites, discover
from patchpar.strategies import parse_strategy
from tests.exact import denoisers
from tests.tensors import relative

TIMES = (981.0, 961.0, 921.0, 901.0, 901.0, 841.0, 601.0, 581.0)  # some steps longer than others, one of no length


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """So many evaluations of one denoiser, whose input changes from one to the next. `exchange` as in the engine."""

    strategy: str
    denoiser: str = "sd"
    size: tuple[int, int] = (27, 9)
    evaluations: int = 4
    exchange: str = "on"
    branch: int = 0  # of guidance: another text


def title(run: Run) -> str:
    """Short name of a run for the list of tests."""
    return f"{run.denoiser}-{run.strategy}"


def arguments(run: Run, evaluation: int) -> dict[str, Any]:
    """What the denoiser is called with, the same on every rank."""
    call = denoisers.call(run.denoiser, *run.size)
    noise = torch.randn(call["sample"].shape, generator=torch.Generator().manual_seed(evaluation))
    if run.branch:
        call["encoder_hidden_states"] = -call["encoder_hidden_states"]
    time = torch.tensor(TIMES[evaluation % len(TIMES)])
    return call | {"sample": call["sample"] + 0.2 * evaluation * noise, "timestep": time}


def errors(got: Sequence[Tensor], want: Sequence[Tensor]) -> list[float]:
    """Relative difference of every evaluation."""
    return [relative(one, other) for one, other in zip(got, want, strict=True)]


@torch.no_grad()
def plain(run: Run) -> list[Tensor]:
    """What one process predicts."""
    denoiser = denoisers.build(run.denoiser)
    return [denoiser(**arguments(run, evaluation))[0] for evaluation in range(run.evaluations)]


@torch.no_grad()
def emulated(run: Run, ranks: int, evaluations: Sequence[int] = (), *, by_owners: bool = False) -> list[Tensor]:
    """What so many ranks are to predict; `evaluations`: not from the first on, but these.

    `by_owners`: where tokens are sent late, and owners extrapolate them.
    """
    denoiser = denoisers.build(run.denoiser)
    split = "rows" if run.size[0] >= run.size[1] else "columns"
    known = patch("benchmarks.emulation.oracle.discover", lambda *_: sites_of(run.denoiser))
    with known, Emulation(denoiser, ranks, replace(policy_of(run), by_owners=by_owners), split=split):
        return [denoiser(**arguments(run, each))[0] for each in evaluations or range(run.evaluations)]


@cache
def sites_of(name: str) -> ExchangeSites:
    """Probing a denoiser takes longer than a run, so that it is done once."""
    denoiser = denoisers.build(name)
    return discover(denoiser, denoiser.forward, (), arguments(Run(strategy="exact", denoiser=name, size=(16, 12)), 0))


ALONE = EmulatedPolicy(halo="none", moments="separate", context="none", warmup_steps=0)
CONTEXTS = {"displaced": "all", "pcpp": "band"}
MOMENTS = {"sync": "fresh"}


def policy_of(run: Run) -> EmulatedPolicy:
    """A strategy in the words of the emulation."""
    if run.exchange == "off":
        return ALONE
    strategy: Any = parse_strategy(run.strategy)
    if strategy.name == "fresh-edges":
        found = EmulatedPolicy(
            context=strategy.context, band=strategy.band, pool=strategy.pool, refresh=strategy.refresh
        )
        if strategy.context != "partials":
            found = replace(found, extrapolated=strategy.extrapolated, correction=strategy.correction)
    else:
        moments = MOMENTS.get(strategy.group_norm, strategy.group_norm)
        found = EmulatedPolicy(halo="stale", moments=moments, context=CONTEXTS[strategy.name])
        found = replace(found, published=getattr(strategy, "preset", None) == "paper")
        found = replace(found, fraction=getattr(strategy, "fraction", 1.0))
    return replace(found, warmup_steps=strategy.warmup_steps, frozen=run.exchange == "frozen")
