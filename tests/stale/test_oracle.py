"""Ranks predict what the emulation in one process predicts, at every evaluation and whatever is stale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from tests.breadth import first_of
from tests.exact import denoisers

from .runs import Run, emulated, errors, plain

ON_RANKS = "tests.stale.on_ranks"
SAME = 1e-5
GROUP_NORMS = ("corrected", "guarded", "stale", "separate", "sync")
STRATEGIES = (
    *(f"displaced:warmup_steps=1,group_norm={each}" for each in GROUP_NORMS),
    *(f"pcpp:warmup_steps=2,group_norm={each}" for each in GROUP_NORMS),
    "displaced:warmup_steps=2,preset=paper",
    "displaced:warmup_steps=1,preset=paper,group_norm=sync",
    "pcpp:warmup_steps=1,fraction=0.5",
    "pcpp:warmup_steps=1,fraction=1.0",
    "pcpp:warmup_steps=1,fraction=0.5,context=paper",
    "fresh-edges",
    "fresh-edges:correction=linear",
    "fresh-edges:correction=linear,extrapolated=false,context=pooled,pool=2",
    "fresh-edges:correction=none",
    "fresh-edges:context=pooled,pool=2",
    "fresh-edges:context=pooled,pool=3,band=0.5,warmup_steps=2",
    "fresh-edges:context=pooled,band=1.0",
    "fresh-edges:context=partials,refresh=3",
    "fresh-edges:context=partials,refresh=2,warmup_steps=2",
)
QUICK = ("fresh-edges:context=partials,refresh=2,warmup_steps=2",)
"""A reduced context. Stale halos and moments: `test_guidance_that_ends_half_way`, in test_pipelines.py."""
FEW = ("displaced:warmup_steps=1", "pcpp:warmup_steps=1", "fresh-edges")
FAR = ("fresh-edges:context=pooled,pool=3", "fresh-edges:context=partials,refresh=3")
STALE_HALO = "displaced:warmup_steps=2,group_norm=sync"


def on_ranks(ranks: Any, world: int, runs: Sequence[Run], through: str = "auto") -> list[list[Tensor]]:
    """Predictions of every run; the same on every rank."""
    found, *others = ranks.run(f"{ON_RANKS}:predicted", world, list(runs), through=through)
    for other in others:
        assert all(errors(one, two) == [0.0] * len(one) for one, two in zip(found, other, strict=True))
    return list(found)


def check(ranks: Any, world: int, *runs: Run, through: str = "auto") -> None:
    """Each run is as emulated, and far from what it would be if nothing were sent any more."""
    frozen = [replace(run, exchange="frozen") for run in runs]
    found = on_ranks(ranks, world, [*runs, *frozen], through)
    for run, got, control in zip(runs, found, found[len(runs) :], strict=False):
        want = emulated(run, world)
        assert max(errors(got, want)) <= SAME, (run, errors(got, want))
        assert errors(control, want)[-1] > 10 * SAME, (run, errors(control, want))


@pytest.mark.parametrize("strategy", first_of(STRATEGIES, *QUICK))
def test_every_option_on_three_uneven_bands(ranks: Any, strategy: str) -> None:
    check(ranks, 3, Run(strategy=strategy))


@pytest.mark.breadth
@pytest.mark.parametrize("name", first_of(denoisers.KINDS, "asymmetric"))
def test_every_kind_of_denoiser_on_two_bands(ranks: Any, name: str) -> None:
    size = (9, 19) if denoisers.KINDS[name].odd else (12, 20)
    check(ranks, 2, *(Run(strategy=strategy, denoiser=name, size=size) for strategy in FEW))


@pytest.mark.breadth
def test_four_uneven_bands(ranks: Any) -> None:
    check(ranks, 4, *(Run(strategy=strategy, denoiser="sdxl", size=(43, 15)) for strategy in ("fresh-edges", FAR[1])))


@pytest.mark.breadth
def test_columns_with_ragged_windows(ranks: Any) -> None:
    check(ranks, 3, *(Run(strategy=strategy, size=(21, 31)) for strategy in FAR))


@pytest.mark.breadth
def test_through_torch_distributed(ranks: Any) -> None:
    check(ranks, 3, *(Run(strategy=strategy) for strategy in (FEW[0], FAR[0])), through="torch")


@pytest.mark.parametrize("exchange", first_of(["off", "frozen"]))
def test_the_controls_are_what_they_say(ranks: Any, exchange: str) -> None:
    """Every band alone; and: after the exact steps nothing is sent, whatever would be of this step otherwise."""
    runs = [Run(strategy=strategy, exchange=exchange) for strategy in (*FEW, FAR[1], STALE_HALO)]
    for run, got in zip(runs, on_ranks(ranks, 3, runs), strict=True):
        assert max(errors(got, emulated(run, 3))) <= SAME, (run, errors(got, emulated(run, 3)))
        assert errors(got, plain(run))[-1] > 1000 * SAME


def test_exact_in_the_warm_up_and_not_after(ranks: Any) -> None:
    runs = [Run(strategy=f"{name}:warmup_steps=2", evaluations=3) for name in ("displaced", "pcpp", "fresh-edges")]
    for run, got in zip(runs, on_ranks(ranks, 2, runs), strict=True):
        found = errors(got, plain(run))
        assert max(found[:2]) <= SAME
        assert found[2] > 10 * SAME


@pytest.mark.breadth
@pytest.mark.parametrize("context", ["all", "pooled"])
def test_fewer_bits_are_farther_from_all(ranks: Any, context: str) -> None:
    """What rounding leaves out follows in the next difference, so that the error does not pile up."""
    texts = [f"fresh-edges:context={context},bits={bits}" for bits in (16, 8, 4)]
    runs = [Run(strategy=text, size=(27, 13), evaluations=6) for text in texts]
    whole, eight, four, frozen = on_ranks(ranks, 3, [*runs, replace(runs[0], exchange="frozen")])
    assert errors(eight, whole)[0] == errors(four, whole)[0] == 0.0
    assert 0 < errors(eight, whole)[-1] < 1e-3
    assert errors(eight, whole)[-1] < errors(four, whole)[-1] < 2e-2
    assert errors(frozen, whole)[-1] > 2 * errors(four, whole)[-1]
