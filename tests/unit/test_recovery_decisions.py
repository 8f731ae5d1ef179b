"""With which plan, on which ranks and how often a job is made again after a failure, without any ranks."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from patchpar.errors import (
    LaunchError,
    PlanError,
    ReplayMismatch,
    RetriesExhausted,
    WorkerDied,
    WorkerError,
    WorkerHung,
    WorkerOutOfMemory,
)
from patchpar.pipeline.recovery import Recovery
from patchpar.plan.plan import Plan

DIED, HUNG = WorkerDied("rank 1 has died.\nits last words", rank=1), WorkerHung("rank 1 has not answered", rank=1)
LACKED = WorkerOutOfMemory("CUDA out of memory", rank=1, cause="OutOfMemoryError")
PATCHES = Plan.parse("patch=2")
PAIR = (0, 1)
FREE = [
    SimpleNamespace(device=1.5e9, host=None),
    SimpleNamespace(device=2e9, host=64e9),
    SimpleNamespace(device=None, host=64e9),
    SimpleNamespace(device=None, host=None),
]


def degrees(plan: Plan) -> str:
    """The axes of a plan as text."""
    return ",".join(f"{name}={degree}" for name, degree in plan.degrees().items() if degree > 1) or "single"


class Journal:
    """Of a job that has so many denoiser calls in it."""

    def __init__(self, length: int) -> None:
        self.length, self.cleared = length, list[str]()

    def clear(self, reason: str) -> None:
        self.cleared.append(reason)
        self.length = 0


class Job:
    """A job on `world` ranks, of which those `lost` do not answer; `refused`: plans that the call cannot have."""

    def __init__(
        self,
        *,
        world: int = 4,
        lost: tuple[int, ...] = (),
        refused: tuple[str, ...] = (),
        journal: int | None = 3,
        kind: str = "local",
        progress: tuple[int, int] = (1, 4),
        vae: str = "whole",
        named: tuple[int, ...] | None = None,
        max_retries: int = 2,
        has_groups: bool = False,
    ) -> None:
        self.journal = None if journal is None else Journal(journal)
        self.caller: Any = SimpleNamespace(journal=self.journal, progress=progress, vae=None, bound={}, kwargs={})
        self.asked, self.chosen_for = list[tuple[int, ...]](), list[tuple[int, ...]]()

        def call(method: str, *, releases: bool, ranks: tuple[int, ...]) -> list[Any]:
            assert (method, releases) == ("free_memory", True)
            self.asked.append(ranks)
            return [FREE[rank] for rank in ranks]

        def ready(ranks: tuple[int, ...]) -> list[int]:
            return [rank for rank in ranks if rank not in lost]

        def choose(rule: Any, ranks: Any, kwargs: Any) -> Any:
            self.chosen_for.append(tuple(ranks))
            return SimpleNamespace(plan=Plan.parse(f"patch={len(ranks)}"), explanation=f"for {len(ranks)}")

        def check(plan: Plan, ranks: Any, kwargs: Any) -> None:
            assert len(ranks) >= plan.world_size
            if degrees(plan) in refused:
                raise PlanError(f"{plan} is refused")

        of_ranks = SimpleNamespace(kind=kind, call=call, ready=ready, world_size=world)
        self.state: Any = SimpleNamespace(
            ranks=of_ranks,
            choose=choose,
            check=check,
            in_order=lambda ranks: tuple(sorted(ranks) if has_groups else ranks),
            request=SimpleNamespace(vae=vae),
        )
        placement: Any = SimpleNamespace(rule=None, ranks=named, max_retries=max_retries)
        self.recovery = Recovery(self.state, self.caller, placement)

    def after(self, error: Exception, plan: Plan = PATCHES, ranks: tuple[int, ...] = PAIR) -> tuple[str, Any, str]:
        """The next attempt: the degrees of its plan, its ranks and the reason."""
        found, where, why = self.recovery.after(error, plan, ranks)
        return degrees(found), where, why


@pytest.mark.parametrize("error", [DIED, HUNG, LaunchError("no start")])
def test_ranks_that_are_left_go_on_with_a_plan_for_so_many(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    if isinstance(error, LaunchError):
        error.__cause__ = DIED
    job = Job(lost=(3, 5))
    with caplog.at_level(logging.WARNING):
        found = job.after(error, Plan.parse("patch=4"), (2, 3, 4, 5))
    assert found == ("patch=2", (2, 4), "ranks 3, 5 lost: for 2")
    assert job.chosen_for == [(2, 4)]
    assert job.recovery.retries == 1
    (line,) = caplog.messages
    assert line.startswith(str(error).partition("\n")[0].removesuffix("."))
    assert "the job is made again from denoiser call 3, with plan patch=2,strategy=exact" in line


def test_where_groups_are_prepared_ranks_come_in_order() -> None:
    assert Job(lost=(1,), has_groups=True).after(DIED, Plan.parse("patch=3"), (3, 1, 2))[1] == (2, 3)
    assert Job(lost=(1,)).after(DIED, Plan.parse("patch=3"), (3, 1, 2)) == ("patch=2", (3, 2), "rank 1 lost: for 2")


@pytest.mark.parametrize(
    ("plan", "job"),
    [
        ("patch=2", Job(lost=(0, 1))),
        ("patch=2", Job()),  # all answer again
        ("data=2", Job(lost=(1,))),
        ("patch=2,weights=sharded", Job(lost=(1,))),
        ("patch=2,strategy=structure", Job(lost=(1,))),
        ("patch=2", Job(lost=(1,), refused=("single",))),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_otherwise_new_workers_have_the_same_plan(plan: str, job: Job, caplog: pytest.LogCaptureFixture) -> None:
    before = Plan.parse(plan)
    assert job.after(DIED, before) == (degrees(before), PAIR, "")
    assert "the job is made again from denoiser call 3, on new workers" in caplog.text
    assert () not in job.chosen_for


def test_prompts_are_not_divided_where_they_have_not_been() -> None:
    job = Job(lost=(3,))
    job.state.choose = lambda *_: SimpleNamespace(plan=Plan.parse("data=2"), explanation="")
    assert job.after(DIED, Plan.parse("patch=3"), (1, 2, 3)) == ("patch=3", (1, 2, 3), "")


def test_a_job_is_made_again_as_often_as_it_may_be() -> None:
    job = Job(max_retries=2, lost=(1,))
    job.after(DIED)
    job.after(HUNG)
    with pytest.raises(
        RetriesExhausted, match=r"this job was made 3 times, as often as max_retries=2 .*died"
    ) as raised:
        job.after(DIED)
    assert raised.value.rank == 1
    failed = LaunchError("they died while they loaded the model")
    failed.__cause__ = DIED
    with pytest.raises(LaunchError, match="while they loaded"):
        job.after(failed)


@pytest.mark.parametrize("error", [DIED, HUNG, LaunchError("hangs"), WorkerError("raised"), ValueError("wrong")])
def test_what_is_not_made_again_is_raised(error: Exception) -> None:
    """No worker is lost, or the call is plain, or a job that is not to be made again."""
    jobs = [Job(journal=None)] + [Job(max_retries=0)] * isinstance(error, (WorkerDied, WorkerHung))
    for job in jobs if isinstance(error, (WorkerDied, WorkerHung)) else [*jobs, Job()]:
        with pytest.raises(type(error)) as raised:
            job.after(error)
        assert raised.value is error


def test_a_journal_that_does_not_fit_is_given_up_once() -> None:
    for error in (ReplayMismatch("another shape.\nmore"), WorkerError("", cause="patchpar.errors.ReplayMismatch")):
        job = Job(max_retries=0)
        assert job.after(error) == ("patch=2", PAIR, "")
        assert job.journal is not None
        assert job.journal.cleared == [str(error).partition("\n")[0].removesuffix(".")]
        with pytest.raises(type(error)):
            job.after(error)
        assert job.recovery.retries == 0


def test_an_image_that_does_not_fit_is_made_on_as_many_ranks_as_there_may_be(caplog: pytest.LogCaptureFixture) -> None:
    why = "on more ranks, since a device lacked memory with patch=2,strategy=exact"
    assert Job().after(LACKED, ranks=(2, 1)) == ("patch=4", (2, 1, 0, 3), why)
    assert Job(has_groups=True, world=3).after(LACKED, ranks=(2, 1)) == ("patch=3", (0, 1, 2), why)
    assert Job(refused=("patch=4",)).after(LACKED) == ("patch=3", (0, 1, 2), why)
    assert Job(named=(3, 0, 1)).after(LACKED, ranks=(3, 0)) == ("patch=3", (3, 0, 1), why)
    both = Job().after(LACKED, Plan.parse("cfg=2"), PAIR)
    assert both == ("cfg=2,patch=2", (0, 1, 2, 3), "on more ranks, since a device lacked memory with cfg=2")
    uneven = Plan.parse("patch=2,ratio=2:1")
    assert Job().after(LACKED, uneven)[0] == "patch=4", "the ratio is of two ranks"
    assert Job(progress=(0, 0)).after(LACKED)[0] == "patch=4", "before the first step"
    raised_here = torch.OutOfMemoryError("CUDA out of memory")
    assert Job().after(raised_here)[0] == "patch=4"
    assert caplog.messages[-1] == f"CUDA out of memory; the job is made again {why}"
    with pytest.raises(WorkerOutOfMemory) as raised:
        Job(world=2).after(raised_here)
    assert raised.value.cause == "OutOfMemoryError"


def test_what_does_not_fit_on_all_ranks_is_told_with_what_is_free() -> None:
    job = Job(world=2)
    with pytest.raises(WorkerOutOfMemory) as raised:
        job.after(LACKED)
    free = "rank 0 1.50 GB of its device, rank 1 2.00 GB of its device and 64.00 GB of the host"
    assert raised.value.free == free
    assert (raised.value.rank, raised.value.cause) == (1, "OutOfMemoryError")
    assert f"a device of ranks (0, 1) lacked memory, in step 2 of 4; free now: {free}. Use a smaller" in str(
        raised.value
    )
    assert str(raised.value).endswith("CUDA out of memory")
    with pytest.raises(WorkerOutOfMemory, match=r"rank 2 64\.00 GB of the host, rank 3 unknown\. Use"):
        Job().after(LACKED, Plan.parse("patch=4"), (0, 1, 2, 3))
    for progress, where in (((0, 0), "before the end of the first step"), ((4, 4), "in step 4 of 4")):
        with pytest.raises(WorkerOutOfMemory, match=f"lacked memory, {where}"):
            Job(world=2, progress=progress, vae="tiled").after(LACKED)


def test_what_does_not_fit_is_tried_once() -> None:
    job = Job()
    job.after(LACKED)
    with pytest.raises(
        WorkerOutOfMemory, match="and there is none either for the attempt that was to take less, in step"
    ):
        job.after(LACKED, Plan.parse("patch=4"), (0, 1, 2, 3))
    with pytest.raises(WorkerOutOfMemory, match="there is none either"):
        job.recovery.refuse(PlanError("a convolution reads 2 rows"), Plan.parse("patch=4"), (0, 1, 2, 3))
    Job(world=2).recovery.refuse(PlanError("of a job that has lacked nothing"), PATCHES, PAIR)
    for progress in ((1, 4), (4, 4)):
        job = Job()
        job.after(LACKED)
        job.caller.progress = progress
        with pytest.raises(WorkerOutOfMemory, match="there is none either"):
            job.after(LACKED)


def test_an_image_that_does_not_fit_in_tiles_either_is_not_made_again() -> None:
    """More ranks would compute all its steps once more."""
    pipeline, call = Job(progress=(4, 4), vae="tiled"), Job(progress=(4, 4))
    call.caller.vae = "tiled"
    for job in (pipeline, call):
        with pytest.raises(WorkerOutOfMemory, match="in step 4 of 4"):
            job.after(LACKED)


def test_an_image_that_is_not_decoded_is_decoded_in_tiles() -> None:
    job = Job(progress=(4, 4))
    assert job.after(LACKED) == ("patch=2", PAIR, "decoded in tiles, since a device lacked memory for the image")
    assert job.caller.vae == "tiled"
    with pytest.raises(WorkerOutOfMemory, match="there is none either"):
        job.after(LACKED)


def test_a_plain_call_is_told_what_is_free_where_ranks_are_workers() -> None:
    with pytest.raises(WorkerOutOfMemory, match=r"lacked memory, in step 2 of 4; free now: rank 0 1\.50 GB"):
        Job(journal=None).after(LACKED)
    job = Job(journal=None, kind="torchrun")
    with pytest.raises(WorkerOutOfMemory) as raised:
        job.after(LACKED)
    assert raised.value is LACKED
    assert not job.asked
