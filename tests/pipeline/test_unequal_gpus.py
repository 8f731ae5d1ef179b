"""GPUs that sample different noise from one seed: the first one's is that of all, as with plain diffusers on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from diffusers import DiffusionPipeline, EulerAncestralDiscreteScheduler

from patchpar import ParallelPipeline
from patchpar.errors import PlanError, WorkerHung
from patchpar.pipeline import startup
from tests.breadth import first_of

from .conftest import EXACT, QUICK, generator, relative_error
from .unequal import WIDTHS, SamplesOnRankOne, SamplesOtherShapes

CALL = {**QUICK, "output_type": "latent"}
TWO = {"prompt": ["a small red house", "a blue tower"]}
BY: dict[str, Callable[[], dict[str, Any]]] = {
    "a generator": lambda: {"generator": generator()},
    "a list of generators": lambda: {"generator": [generator(1), generator(2)], "num_images_per_prompt": 2},
    "the default generator": lambda: {},
}


@pytest.fixture(scope="module")
def unequal(sdxl_folder: Path) -> Iterator[ParallelPipeline]:
    with (
        patch.object(startup, "ENGINE", "tests.pipeline.unequal:UnequalRunner"),
        ParallelPipeline.from_pretrained(sdxl_folder, devices="cpu:2", verify=False, deadline=10.0) as pipe,
    ):
        pipe.set_progress_bar_config(disable=True)
        pipe.scheduler = EulerAncestralDiscreteScheduler.from_config(pipe.scheduler.config)  # has noise in each step
        yield pipe


@pytest.fixture
def widths(unequal: ParallelPipeline) -> Iterator[None]:
    with patch.object(unequal._executor, "random_widths", WIDTHS):
        yield


@pytest.fixture(scope="module")
def ancestral(sdxl_folder: Path) -> Any:
    """The pipeline without us."""
    pipe = DiffusionPipeline.from_pretrained(sdxl_folder)
    pipe.set_progress_bar_config(disable=True)
    pipe.scheduler = EulerAncestralDiscreteScheduler.from_config(pipe.scheduler.config)
    return pipe


def both(unequal: ParallelPipeline, ancestral: Any, plan: str, call: Callable[[], Any]) -> tuple[Any, Any]:
    """What two ranks and what plain diffusers return, each with what its generators sample next."""
    found = []
    unequal.plan = plan
    for pipe in (unequal, ancestral):
        torch.manual_seed(5)
        arguments = {**CALL, **call()}
        output, given = pipe(**arguments), arguments.get("generator")
        given = given if isinstance(given, list) else [given]
        found.append((output, [torch.rand(3, generator=each) for each in (*given, None)]))
    return found[0], found[1]


@pytest.mark.usefixtures("widths")
@pytest.mark.parametrize("plan", first_of(("cfg=2", "patch=2", "stage=2", "patch=2,strategy=displaced"), "cfg=2"))
@pytest.mark.parametrize("by", BY)
def test_the_image_of_the_first_rank(unequal: ParallelPipeline, ancestral: Any, plan: str, by: str) -> None:
    (got, after), (want, plain_after) = both(unequal, ancestral, plan, BY[by])
    if "displaced" not in plan:
        assert relative_error(got, want) <= EXACT
    assert all(map(torch.equal, after, plain_after))
    assert unequal.last_run is not None
    assert unequal.last_run.ranks[0].bytes_sent["noise"] > 0


@pytest.mark.usefixtures("widths")
@pytest.mark.parametrize("by", ["a generator", "the default generator"])
def test_prompts_on_different_ranks(unequal: ParallelPipeline, ancestral: Any, by: str) -> None:
    (got, after), (want, plain_after) = both(unequal, ancestral, "data=2", lambda: {**TWO, **BY[by]()})
    assert relative_error(got, want) <= EXACT
    assert all(map(torch.equal, after, plain_after))


@pytest.mark.parametrize("plan", ["cfg=2", "data=2"])
def test_control_each_rank_with_its_own_noise(unequal: ParallelPipeline, ancestral: Any, plan: str) -> None:
    """As ranks that are taken for equal have it."""
    (got, _), (want, _) = both(unequal, ancestral, plan, lambda: {**TWO, "generator": generator()})
    assert relative_error(got, want) > 0.1


@pytest.mark.usefixtures("widths")
def test_the_first_rank_is_that_of_the_call(unequal: ParallelPipeline) -> None:
    alone, together = (
        unequal.submit(**CALL, generator=generator(), ranks=ranks, plan=plan).result(60)
        for ranks, plan in (((1,), ""), ((1, 0), "cfg=2"))
    )
    assert relative_error(together, alone) <= EXACT


@pytest.mark.usefixtures("widths")
def test_a_generator_for_each_prompt_of_different_ranks_is_refused(unequal: ParallelPipeline) -> None:
    unequal.plan = "data=2"
    with pytest.raises(PlanError, match=r"cpu: 1, cpu: 2 values side by side.*data=2 each .* 2 generators.*or data=1"):
        unequal(**{**CALL, **TWO}, generator=[generator(1), generator(2)])


@pytest.mark.usefixtures("widths")
def test_ranks_that_sample_different_tensors(unequal: ParallelPipeline) -> None:
    unequal.plan = "cfg=2"
    differ = r"rank 0 randn \(4, 4\) float32, rank 1 randn \(4, 5\) float32.*let the CPU sample it"
    with pytest.raises(PlanError, match=differ):
        unequal(**CALL, callback_on_step_end=SamplesOtherShapes())


@pytest.mark.usefixtures("widths")
def test_a_rank_that_does_not_sample_is_missed(unequal: ParallelPipeline, ancestral: Any) -> None:
    """In the last step, after which it has nothing to receive."""
    unequal.plan = "cfg=2"
    with pytest.raises(WorkerHung, match=r"noise \d+ \(randn\)"):
        unequal(**{**CALL, "num_inference_steps": 1}, callback_on_step_end=SamplesOnRankOne())
    (got, _), (want, _) = both(unequal, ancestral, "cfg=2", BY["a generator"])
    assert relative_error(got, want) <= EXACT, "the next call"
