"""Whole pipelines with values of the last step, whatever calls the denoiser, and how often in a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.breadth import first_of
from tests.conftest import POOL_SIZE
from tests.tensors import relative

from .pipelines import SCHEDULERS, WIDE, Case, ImageCall, RankOutput, emulated, plain

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__")  # KDPM2 of diffusers, with NumPy 2
ON_RANKS = "tests.stale.pipelines"
SAME = 1e-4
"""Relative error of final latents: rounding of several steps, each of which starts from the last one's."""
DISPLACED = "patch=2,strategy=displaced:warmup_steps=1"
POOLED = "patch=2,strategy=fresh-edges:context=pooled:pool=2"
TOGETHER = ("displaced", "pcpp:fraction=0.5", "fresh-edges", "fresh-edges:context=partials")
EVALUATIONS = {"Heun": 7, "KDPM2": 7}  # of four steps; the last one of these needs one only


def generate(ranks: Any, cases: Sequence[Case], *images: ImageCall) -> list[list[RankOutput]]:
    found: list[list[RankOutput]] = ranks.run(f"{ON_RANKS}:generated", POOL_SIZE, list(cases), list(images))[0]
    return found


def latents(generated: RankOutput) -> Tensor:
    assert generated.latents is not None
    return generated.latents


@pytest.mark.parametrize("scheduler", first_of(SCHEDULERS))
def test_every_scheduler(ranks: Any, scheduler: str) -> None:
    """As emulated; not as in one process, nor as with an exchange that has stopped."""
    cases = [Case(plan=plan, scheduler=scheduler) for plan in (DISPLACED, POOLED)]
    frozen = Case(plan=DISPLACED, scheduler=scheduler, exchange="frozen")
    *found, (control,) = generate(ranks, [*cases, frozen], ImageCall())
    whole = plain(cases[0], ImageCall())
    for case, (got,) in zip(cases, found, strict=True):
        assert relative(latents(got), emulated(case, ImageCall())) <= SAME
        assert relative(latents(got), whole) > 3 * SAME
    assert relative(latents(control), emulated(cases[0], ImageCall())) > 3 * SAME


@pytest.mark.parametrize("scheduler", first_of(SCHEDULERS))
def test_the_warm_up_counts_denoising_steps(ranks: Any, scheduler: str) -> None:
    order, evaluations = SCHEDULERS[scheduler].order, EVALUATIONS.get(scheduler, 4)
    plans = {warmup: f"patch=2,strategy=displaced:warmup_steps={warmup}" for warmup in (1, 2)}
    found = generate(ranks, [Case(plan=plan, scheduler=scheduler) for plan in plans.values()], ImageCall())
    for warmup, (got,) in zip(plans, found, strict=True):
        assert (got.exact_calls, got.stale_calls) == (warmup * order, evaluations - warmup * order)


@pytest.mark.breadth
@pytest.mark.parametrize(
    ("pipeline", "strategy"),
    first_of(
        [(pipeline, strategy) for pipeline in ("sd", "sdxl") for strategy in TOGETHER],
        ("sdxl", "fresh-edges:context=partials"),
    ),
)
def test_both_splits_together(ranks: Any, pipeline: str, strategy: str) -> None:
    case = Case(plan=f"cfg=2,patch=2,strategy={strategy}:warmup_steps=2", pipeline=pipeline)
    images = [ImageCall(size=size) for size in (ImageCall().size, WIDE)]
    for image, got in zip(images, generate(ranks, [case], *images)[0], strict=True):
        assert relative(latents(got), emulated(case, image)) <= SAME
        assert relative(latents(got), plain(case, image)) > 3 * SAME


@pytest.mark.breadth
@pytest.mark.parametrize("plan", first_of(["patch=2", "cfg=2,patch=2"], "cfg=2,patch=2"))
def test_as_many_exact_steps_as_steps_are_exact_bit_for_bit(ranks: Any, plan: str) -> None:
    strategies = {"displaced": 4, "pcpp": 9, "fresh-edges": 4, "fresh-edges:bits=8": 9}
    plans = [f"{plan},strategy={strategy}:warmup_steps={steps}" for strategy, steps in strategies.items()]
    cases = [Case(plan=each) for each in (f"{plan},strategy=exact", *plans)]
    (exact,), *found = generate(ranks, cases, ImageCall())
    assert all(torch.equal(latents(got), latents(exact)) for (got,) in found)
    assert [got.stale_calls for (got,) in found] == [0] * len(plans)


@pytest.mark.parametrize("plan", first_of([DISPLACED, POOLED, f"cfg=2,{DISPLACED}"], f"cfg=2,{DISPLACED}"))
def test_guidance_that_ends_half_way(ranks: Any, plan: str) -> None:
    """The batch becomes another: that evaluation is exact, and the next ones use values of its own.

    With axis `cfg` a rank's share of it keeps its shape, but is of another branch.
    """
    case, image = Case(plan=plan), ImageCall(steps=6, unguided_after=3)
    (got,) = generate(ranks, [case], image)[0]
    assert relative(latents(got), emulated(case, image)) <= SAME
    assert (got.exact_calls, got.stale_calls) == (2, 4)


def test_one_step(ranks: Any) -> None:
    case, image = Case(plan=DISPLACED, scheduler="LCM"), ImageCall(steps=1)
    (got,) = generate(ranks, [case], image)[0]
    assert relative(latents(got), plain(case, image)) <= SAME
    assert (got.exact_calls, got.stale_calls) == (1, 0)
