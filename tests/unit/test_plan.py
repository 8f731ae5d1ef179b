"""Plans are read, printed and refused with the ways out."""

from __future__ import annotations

import pytest

from patchpar.errors import PlanError
from patchpar.plan.names_elsewhere import PLANS, advice
from patchpar.plan.plan import Plan


@pytest.mark.parametrize(
    ("text", "plan", "printed"),
    [
        ("cfg=2,patch=2", Plan(cfg=2, patch=2), "cfg=2,patch=2,strategy=exact"),
        (" patch = 3 , split=columns ", Plan(patch=3, split="columns"), "patch=3,split=columns,strategy=exact"),
        ("data=4", Plan(data=4), "data=4"),
        ("cfg=2,stage=2", Plan(cfg=2, stage=2), "cfg=2,stage=2"),
        ("stage=2,patch=2", Plan(stage=2, patch=2), "stage=2,patch=2,strategy=exact"),
        ("", Plan(), "single"),
    ],
)
def test_a_plan_is_read_and_printed(text: str, plan: Plan, printed: str) -> None:
    assert Plan.parse(text) == plan
    assert str(plan) == printed


@pytest.mark.parametrize("plan", [Plan(cfg=2, patch=2), Plan(data=2, patch=3, split="rows"), Plan(cfg=2)])
def test_what_is_printed_can_be_read(plan: Plan) -> None:
    assert Plan.parse(str(plan)) == plan


def test_degrees_multiply_to_the_devices() -> None:
    plan = Plan(data=2, cfg=2, patch=3)
    assert plan.world_size == 12
    plan.check_devices(12)
    with pytest.raises(PlanError, match=r"data=2 x cfg=2 x patch=3 takes 12 devices, but there are 8.*use 12 devices"):
        plan.check_devices(8)
    with pytest.raises(PlanError, match=r"plan single takes 1 device, but there are 2: .*use 1 device"):
        Plan().check_devices(2)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("patches=2", "unknown axis 'patches'.*data, cfg, stage, patch"),
        ("cfg", "'cfg'.*axis=degree"),
        ("cfg=two", "cfg=two: .*whole number"),
        ("patch=0", "patch=0: .*at least 1"),
        ("patch=-2", "patch=-2: .*at least 1"),
        ("patch=100001", "patch=100001: .*at least 1, and at most 100,000"),
        (f"patch={'9' * 5000}", "patch=9.*whole number"),
        (f"patch=2,ratio={'9' * 5000}:1", "ratio=9.*: numbers with colons between"),
        ("patch=2,split=diagonal", "split='diagonal': use one of auto, rows, columns"),
        ("patch=2,weights=split", "weights='split': use one of whole, sharded, hosted"),
        (
            "stage=2,weights=sharded",
            "weights=sharded divides every block .*use weights=hosted where",
        ),
        ("tensor=2,weights=sharded", "which is 1 rank: use patch=2 or cfg=2 or more, weights=hosted"),
        ("patch=2,encoders=one,weights=hosted", "weights=hosted on all: leave one of them out"),
        (
            "data=2,weights=sharded",
            "ranks of one image .*which is 1 rank: use patch=2 or cfg=2 or more, weights=hosted",
        ),
        ("stage=0", "stage=0: .*at least 1"),
        ("stage=2,patch=3,strategy=piped", r"pieces of the image one after the other.*use stage=6, or strategy=exact"),
        ("stage=2,tensor=3", "stage=2 divides the blocks.*tensor=3 their features: .*stage=6 or tensor=6"),
        ("cfg=2,stage=2,weights=sharded", "weights=whole, or patch=2 instead of stage"),
        ("patch=2,resident=1", "resident=1 is for weights=sharded"),
        ("patch=2,weights=sharded,resident=-1", "resident=-1: it is a number of blocks"),
        ("patch=2,weights=sharded,resident=few", "resident=few: the number of resident blocks is a whole number"),
    ],
)
def test_what_is_wrong_is_named_with_what_is_right(text: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        Plan.parse(text)


@pytest.mark.parametrize("degree", [True, 2.0, "2", None])
def test_a_degree_is_a_whole_number(degree: object) -> None:
    with pytest.raises(PlanError, match="whole number"):
        Plan(patch=degree)  # type: ignore[arg-type]


def test_a_plan_is_frozen_and_comparable() -> None:
    assert len({Plan(cfg=2), Plan(cfg=2), Plan(cfg=3)}) == 2
    with pytest.raises(AttributeError):
        Plan().cfg = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("ulysses_degree=2", "patch=N,strategy=exact:ulysses=N"),
        ("cfg=2,ring-degree=2", "patch=N,strategy=exact:attention=ring"),
        ("pipefusion_parallel_degree=2", "stage=N,strategy=piped"),
        ("data_parallel_degree=2", "data=N"),
        ("use_cfg_parallel", "cfg=N"),
        ("tensor_parallel_size=2", "tensor=N"),
        ("patch=2,strategy=pipefusion", "stage=N,strategy=piped"),
        ("patch=2,strategy=DistriFusion", "patch=N,strategy=displaced:preset=paper"),
    ],
)
def test_names_of_other_libraries_are_told_what_they_are_here(text: str, named: str) -> None:
    """In the message that refuses them."""
    with pytest.raises(PlanError, match=rf"other libraries call .* is {named} here$"):
        Plan.parse(text)


def test_what_other_libraries_have_is_a_plan_here() -> None:
    assert {Plan.parse(plan.replace("N", "2")).world_size for plan in PLANS.values()} == {2}
    assert advice("patches") == ""
