"""Rows and tokens in a ratio, for devices of different speed: exact as in equal parts, and as large as asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from patchpar.errors import PlanError
from patchpar.pipeline.measured_ratio import seconds_of, with_measured_ratio
from patchpar.pipeline.planner.image_ranks import ranks_of_image
from patchpar.pipeline.planner.record import Recording
from patchpar.plan.plan import Plan
from patchpar.plan.replay.tape import Operator, Tape, steps_of
from tests import tiny
from tests.breadth import first_of
from tests.exact.pipelines import Case
from tests.planner.on_ranks import call_of
from tests.tensors import relative
from tests.tokens.on_ranks import PipelineCase
from tests.tokens.test_pipelines import generate, plain

LIMIT, CONTROL = 1e-5, 1e-2
UNEVEN = "patch=2,ratio=3:1"
MODES = ("ring", "two-way-ring", "token-ring", "gather:ulysses=2")


@pytest.mark.parametrize("name", first_of(("sd", "sdxl", "svd", "embedded"), "sd"))
def test_bands_in_a_ratio_give_the_latents_of_one_process(ranks: Any, tmp_path: Path, name: str) -> None:
    cases = [Case(plan=UNEVEN, scheduler="DDIM", control=True)]
    if name != "sd":
        cases += [
            Case(plan="cfg=2,patch=2,ratio=1:3", scheduler="Euler ancestral"),
            Case(plan="patch=3,ratio=1:2:1", scheduler="DDIM", guided=False, size=(104, 168)),
            Case(plan=f"{UNEVEN},strategy=exact:attention=ring", scheduler="DDIM"),
            Case(plan=f"{UNEVEN},strategy=exact:ulysses=2", scheduler="DDIM"),
            Case(plan=f"{UNEVEN},weights=sharded", scheduler="DDIM"),
        ]
    found = ranks.run("tests.exact.pipelines:compared", 4, name, cases, str(tmp_path))[0]
    assert max(each.relative_error for each in found) <= LIMIT, found
    assert found[0].control_error >= CONTROL, found


@pytest.mark.breadth
@pytest.mark.parametrize("name", first_of(("flux", "sd3", "wan", "pixart", "qwen"), "flux"))
def test_tokens_in_a_ratio_give_the_latents_of_one_process(ranks: Any, name: str, tmp_path: Path) -> None:
    plans = [UNEVEN]
    if name != "flux":
        plans += ["patch=3,ratio=1:2:1", *(f"{UNEVEN},strategy=exact:attention={mode}" for mode in MODES)]
    cases = [PipelineCase(name=name, plan=plan, verifications=tmp_path) for plan in plans]
    off = PipelineCase(name=name, plan=UNEVEN, exchange="off", verifications=tmp_path)
    *found, alone = generate(ranks, *cases, off)
    assert not [each for each in found if isinstance(each, str)], found
    assert max(relative(each, plain(name)) for each in found) <= LIMIT
    assert relative(alone, plain(name)) > 10 * LIMIT


@pytest.mark.parametrize(("name", "operator"), [("sd", "convolution"), ("sd3", "attention")])
def test_the_work_is_in_the_ratio(name: str, operator: str) -> None:
    """Recorded: the rank with three parts has three times the FLOPs; what one sends the other waits for."""
    plan = Plan.parse(UNEVEN)
    call = call_of(name, 1) | {"height": 128, "width": 64, "output_type": "latent"}
    found = ranks_of_image(plan, Recording(tiny.build(name).pipe, plan, call).of_rank)
    large, small = (flops(tape, operator) for tape in found.tapes)
    assert large == pytest.approx(3 * small, rel=0.02)


def flops(tape: Tape, operator: str) -> int:
    step = steps_of(tape)["step 0"]
    return sum(entry.flops for entry in step if isinstance(entry, Operator) and entry.name == operator)


def test_a_ratio_in_proportion_to_measured_speeds() -> None:
    """Of fake times: rank 1 takes twice as long. Ranks with the same part count as the slower one."""
    assert seconds_of([5.0, 6.0, 7.0, 17.0, 18.0]) == 1.0
    with pytest.raises(PlanError, match="1 denoiser calls could be timed"):
        seconds_of([1.0])
    plan, note = with_measured_ratio(Plan(patch=2, ratio="measured"), (0, 1), {0: 0.5, 1: 1.0})
    assert plan.ratio == (85, 43)
    assert note == "parts as measured: a call takes 0.5, 1 s on the ranks alone"
    four = Plan(cfg=2, patch=2, ratio="measured")
    assert with_measured_ratio(four, (3, 2, 1, 0), {0: 3.0, 1: 1.0, 2: 1.0, 3: 1.0})[0].ratio == (3, 1)
    assert with_measured_ratio(four, (0, 1, 2, 3), dict.fromkeys(range(4), 2.0))[0] == Plan(cfg=2, patch=2)


def test_what_cannot_be_measured_is_refused() -> None:
    assert str(Plan.parse("patch=2,ratio=measured")) == "patch=2,ratio=measured,strategy=exact"
    with pytest.raises(PlanError, match="use patch=2"):
        Plan(ratio="measured")
    for options in ({"weights": "sharded"}, {"stage": 2}, {"tensor": 2}, {"strategy": "structure"}):
        with pytest.raises(PlanError, match="times the whole model on each rank alone"):
            Plan(patch=2, ratio="measured", **options)
    with pytest.raises(PlanError, match="measured by a call of a ParallelPipeline"):
        Plan(patch=2, ratio="measured").mesh(0)


def test_a_ratio_is_a_part_of_the_plan() -> None:
    assert str(Plan(patch=2, ratio=(3, 1))) == "patch=2,ratio=3:1,strategy=exact"
    assert Plan.parse(str(Plan(patch=2, ratio=(3, 1)))) == Plan(patch=2, ratio=(3, 1))
    assert Plan(patch=2, ratio=(2, 2)) == Plan(patch=2)
    assert Plan.parse("patch=2,ratio=1:1") == Plan(patch=2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("patch=3,ratio=3:1", r"are 2 numbers, and axis 'patch' has 3 ranks: use one for each, or patch=2"),
        ("cfg=2,ratio=3:1", r"axis 'patch' has 1 rank: use one for each, or patch=2"),
        ("patch=2,ratio=3:0", r"each is a whole number from 1 to 1000"),
        ("patch=2,ratio=3:one", r"numbers with colons between, as in patch=2,ratio=3:1"),
        ("patch=2,ratio=3:1,strategy=structure", r"gives each rank whole patches"),
    ],
)
def test_a_ratio_that_cannot_be_is_refused(text: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Plan.parse(text)
