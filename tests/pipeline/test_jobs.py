"""Jobs: calls beside each other on some of the ranks, each with the image that it has alone."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.hooks import FirstBlockCacheConfig

from patchpar import CallCancelled, LaunchError, ParallelPipeline, Plan, PlanError, WorkerDied
from patchpar.pipeline import job as job_module
from patchpar.plan.part_ratio import ratio_of
from tests.pipeline.conftest import EXACT, QUICK, WORLD, generator, relative_error
from tests.tiny import build

CALL = {**QUICK, "output_type": "latent"}
SECONDS = 120.0
SETS = [((0, 1), (2, 3)), ((0, 1, 2), (3,)), ((3, 1), (0, 2))]


def plan_for(ranks: tuple[int, ...], number: int) -> str:
    return {1: "single", 2: ("patch=2", "cfg=2")[number % 2], 3: "patch=3", 4: "cfg=2,patch=2"}[len(ranks)]


def submitted(pipe: ParallelPipeline, ranks: tuple[int, ...], number: int, **options: Any) -> Any:
    call = {**CALL, "prompt": f"house {number}", **options}
    return pipe.submit(**call, ranks=ranks, plan=plan_for(ranks, number), generator=generator(number))


@pytest.mark.parametrize("groups", [*(pytest.param(each, marks=pytest.mark.breadth) for each in SETS[:2]), SETS[2]])
def test_jobs_on_different_ranks_make_the_image_they_make_alone(
    four: ParallelPipeline, plain: Any, groups: Any
) -> None:
    alone = [submitted(four, ranks, number).result(SECONDS) for number, ranks in enumerate(groups)]
    jobs = [submitted(four, ranks, number) for number, ranks in enumerate(groups)]
    for number, (job, ranks, want) in enumerate(zip(jobs, groups, alone, strict=True)):
        found = job.result(SECONDS)
        assert relative_error(found, want) == 0.0
        expected = plain(**{**CALL, "prompt": f"house {number}"}, generator=generator(number))
        assert relative_error(found, expected) <= EXACT
        assert [each.rank for each in job.run.ranks] == list(ranks)
        assert (job.progress.step, job.progress.steps, job.is_over) == (2, 2, True)
        assert repr(job).startswith("<PipelineJob, ended: step 2 of 2 on rank")


def test_a_ratio_is_measured_by_a_short_run_on_each_rank(four: ParallelPipeline, plain: Any) -> None:
    """Which neither advances the caller's generator nor asks its callback."""
    call, asked, state = {**CALL, "num_inference_steps": 3}, [], four._state

    def note(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        asked.append(step)
        return {}

    state.seconds_alone = {}
    want = plain(**call, generator=generator())
    for fake in ({}, {0: 1.0, 2: 2.0}):
        state.seconds_alone |= fake
        options = {"plan": "patch=2,ratio=measured", "ranks": (0, 2), "generator": generator()}
        job = four.submit(**call, **options, callback_on_step_end=note)
        assert relative_error(job.result(SECONDS), want) <= EXACT
        assert state.seconds_alone.keys() == {0, 2}
        assert job.run.plan == Plan(patch=2, ratio=ratio_of([1 / state.seconds_alone[rank] for rank in (0, 2)]))
        assert job.reason.startswith("parts as measured: a call takes ")
    assert job.run.plan.ratio == (85, 43)
    assert asked == [0, 1, 2, 0, 1, 2]
    state.seconds_alone = {}


def test_they_run_at_the_same_time(four: ParallelPipeline) -> None:
    """Each waits in its callback until the other one is in its own."""
    both = threading.Barrier(2, timeout=SECONDS)

    def meet(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        both.wait()
        return tensors

    for job in [submitted(four, ranks, 0, callback_on_step_end=meet) for ranks in [(1, 0), (2, 3)]]:
        job.result(SECONDS)


def test_a_job_does_not_wait_for_calls_that_take_turns(four: ParallelPipeline) -> None:
    waits = threading.Thread(target=four, kwargs={**CALL, "generator": generator()})
    with four._state.turns:  # as during a call of another thread
        waits.start()
        time.sleep(0.2)
        submitted(four, (3,), 0).result(SECONDS)
        assert waits.is_alive()
    waits.join(SECONDS)
    assert not waits.is_alive()


def test_a_wait_for_ranks_is_no_time_that_they_took(four: ParallelPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forecasts are compared with the latter: on a clock that stands still but while the job waits."""
    now, found = [0.0], []

    def compared(run: Any, kwargs: Any, busy: float | None) -> Any:
        found.append((run.seconds, busy))
        return run

    monkeypatch.setattr(job_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(four._state.timed, "compared", compared)
    with four._executor._locks.holding([0]):
        job = submitted(four, (0,), 0)
        assert job._is_queued.wait(SECONDS)
        now[0] = 100.0
    job.result(SECONDS)
    assert found == [(100.0, 0.0)]


def test_an_automatic_plan_is_for_the_ranks_of_the_job(four: ParallelPipeline) -> None:
    job = four.submit(**CALL, ranks=(2, 3), generator=generator())
    job.result(SECONDS)
    assert str(job.run.plan) == "cfg=2"
    assert "guidance is on" in job.reason


def test_noise_without_a_generator_is_that_of_torch(four: ParallelPipeline) -> None:
    """Jobs that are submitted one after another have different noise, and the same after the same seed."""
    images = []
    for _ in range(2):
        torch.manual_seed(5)
        jobs = [four.submit(**CALL, ranks=ranks, plan="single") for ranks in [(0,), (1,)]]
        images.append([job.result(SECONDS) for job in jobs])
    for first, again in zip(*images, strict=True):
        assert relative_error(first, again) == 0.0
    assert relative_error(*images[0]) > 0.1


def test_a_job_in_this_process_leaves_its_default_generator_alone(one: ParallelPipeline) -> None:
    """Another thread samples from it in each step, and goes on as if there were no job; so does the job itself."""
    sampled: list[float] = []

    def sample(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        sampled.append(torch.rand(()).item())
        return {}

    images = []
    for _ in range(2):
        torch.manual_seed(5)
        images.append(one.submit(**CALL, callback_on_step_end=sample).result(SECONDS))
        sampled.append(torch.rand(()).item())
    torch.manual_seed(5)
    torch.randint(2**62, ())  # the seed of the job's noise
    assert sampled == [torch.rand(()).item() for _ in range(3)] * 2
    assert relative_error(*images) == 0.0


def test_a_step_cache_keeps_nothing_of_a_call_that_has_failed() -> None:
    """Else the first step of the next request would get the residuals of this one."""
    plain = build("flux")
    plain.pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=1e9))
    arguments = {**plain.call_kwargs, "num_inference_steps": 2, "output_type": "latent"}
    want = plain.pipe(**arguments, generator=generator())
    pipe = build("flux").pipe
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=1e9))

    def fails(*_: Any) -> None:
        raise ValueError("no more")

    with ParallelPipeline(pipe, devices="cpu") as parallel:
        with pytest.raises(ValueError, match="no more"):
            parallel(**arguments, generator=generator(5), callback_on_step_end=fails)
        assert relative_error(parallel(**arguments, generator=generator()), want) == 0.0


@pytest.fixture
def one() -> Iterator[ParallelPipeline]:
    with ParallelPipeline(build("sdxl").pipe, devices="cpu") as pipe:
        pipe.set_progress_bar_config(disable=True)
        yield pipe


def test_a_change_in_a_callback_reaches_ranks_that_took_no_part(four: ParallelPipeline) -> None:
    def filters(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step == 0:
            pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.5, b2=1.6)
        return tensors

    before = submitted(four, (3,), 0).result(SECONDS)
    try:
        submitted(four, (0,), 0, callback_on_step_end=filters).result(SECONDS)
        changed = submitted(four, (3,), 0).result(SECONDS)
        assert relative_error(changed, before) > 100 * EXACT
        assert relative_error(changed, submitted(four, (0,), 0).result(SECONDS)) == 0.0
    finally:
        four.disable_freeu()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ranks": (0, 4)}, r"ranks=\(0, 4\): there is no rank 4: name some of the 4 ranks, 0 to 3"),
        ({"ranks": ()}, r"ranks=\(\): name some of the 4 ranks"),
        ({"ranks": (1, 1)}, r"ranks=\(1, 1\) repeats a rank"),
        ({"ranks": "all"}, r"ranks='all': name some"),
        ({"ranks": (0, 1, 2), "plan": "cfg=2"}, r"plan cfg=2 takes 2 ranks, and ranks=\(0, 1, 2\) are 3: name 2, or"),
        ({"plan": "patch=8"}, r"takes 8 ranks, and there are 4: change a degree"),
        ({"plan": 3}, r"plan=3: use 'auto'"),
        ({"ranks": (0,), "heigth": 64}, r"did you mean 'height'"),
    ],
)
def test_bad_jobs_are_refused_before_any_rank_works(four: ParallelPipeline, options: Any, says: str) -> None:
    with pytest.raises((PlanError, TypeError), match=says):
        four.submit(**{**CALL, **options})


def test_waiting_for_a_job(four: ParallelPipeline) -> None:
    async def main(job: Any) -> Any:
        return await job

    job = submitted(four, (0,), 1, num_inference_steps=4)
    with pytest.raises(TimeoutError, match=r"within 0.01 s: wait again, or call cancel"):
        job.result(0.01)
    assert relative_error(asyncio.run(main(job)), job.result()) == 0.0
    wrong = four.submit(**{**CALL, "prompt_embeds": torch.zeros(1)}, ranks=(0,), plan="single")
    with pytest.raises(ValueError, match="prompt"):
        wrong.result(SECONDS)


@pytest.mark.parametrize("pool", ["four", "one"])
@pytest.mark.parametrize("wait", ["result", "suspend"])
def test_a_callback_cannot_wait_for_a_job(request: pytest.FixtureRequest, pool: str, wait: str) -> None:
    """Neither for its own, nor for one on ranks that wait for the callback."""
    pipe, jobs = request.getfixturevalue(pool), list[Any]()

    def callback(own: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if wait == "result":
            jobs.append(pipe.submit(**CALL, generator=generator()))
        getattr(jobs[-1], wait)(1.0)
        return tensors

    jobs.append(pipe.submit(**CALL, generator=generator(), callback_on_step_end=callback))
    with pytest.raises(LaunchError, match=r"cannot wait for a job, .*when the current call has returned"):
        jobs[0].result(SECONDS)
    assert all(job.result(SECONDS) for job in jobs[1:])


def test_a_job_is_cancelled_without_a_callback(four: ParallelPipeline) -> None:
    """One that runs on two ranks, and one that waits for them; a job on others is left alone, and all workers stay."""
    pids = four._executor.pids
    runs = submitted(four, (0, 1), 0, num_inference_steps=200)
    waits, beside = submitted(four, (1, 2), 1), submitted(four, (3,), 1, num_inference_steps=6)
    while runs.progress.step < 2:
        time.sleep(0.01)
    waits.cancel()
    with pytest.raises(CallCancelled):
        waits.result(SECONDS)
    assert not runs.is_over
    runs.cancel()
    with pytest.raises(CallCancelled):
        runs.result(SECONDS)
    assert runs.progress.step < 200
    beside.result(SECONDS)
    again = submitted(four, (0, 1), 0).result(SECONDS)
    assert relative_error(again, submitted(four, (2, 3), 0).result(SECONDS)) == 0.0
    assert four._executor.pids == pids


def test_a_task_that_is_cancelled_cancels_its_job(four: ParallelPipeline) -> None:
    async def main(job: Any) -> None:
        task = asyncio.ensure_future(job)
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    job = submitted(four, (0, 1), 0, num_inference_steps=200)
    asyncio.run(main(job))
    with pytest.raises(CallCancelled):
        job.result(SECONDS)


@pytest.mark.breadth  # tests/launch/test_some_ranks holds the same of calls, test_recovery of a job that goes on
def test_a_lost_rank_is_replaced_alone(four: ParallelPipeline, plain: Any) -> None:
    """A job on other ranks goes on meanwhile, and the next one on these ranks makes its image."""
    before = four._executor.pids
    beside = submitted(four, (0, 1), 1, num_inference_steps=30)
    lost = submitted(four, (2, 3), 0, num_inference_steps=200, max_retries=0)
    while lost.progress.step < 2:
        time.sleep(0.01)
    os.kill(before[3], signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"rank 3 .*SIGKILL"):
        lost.result(SECONDS)
    found = submitted(four, (3, 2), 0).result(SECONDS)
    assert relative_error(found, plain(**{**CALL, "prompt": "house 0"}, generator=generator(0))) <= EXACT
    beside.result(SECONDS)
    assert [rank for rank in range(WORLD) if four._executor.pids[rank] != before[rank]] == [3]


@pytest.mark.breadth
def test_a_rank_that_left_out_a_call_installs_the_plan_again(four: ParallelPipeline, plain: Any) -> None:
    """The others have forgotten what they knew when it was installed: without that they wait for other messages."""
    want = plain(**{**CALL, "prompt": "house 0"}, generator=generator(0))
    for ranks in [(0, 1, 2), (0, 1), (0, 1, 2), (2, 1, 0), (0, 1, 2)]:
        assert relative_error(submitted(four, ranks, 0).result(SECONDS), want) <= EXACT


def test_weights_that_are_divided_bind_their_ranks(four: ParallelPipeline, plain: Any) -> None:
    """A job on one of them brings the others, so that it has whole weights; then they are free again."""
    want = plain(**{**CALL, "prompt": "house 0"}, generator=generator(0))
    call = {**CALL, "prompt": "house 0"}
    shared = four.submit(**call, plan="patch=2,weights=sharded", ranks=(0, 1), generator=generator(0))
    jobs = [shared, *(submitted(four, ranks, 0) for ranks in [(1, 2), (0,)])]
    assert all(relative_error(job.result(SECONDS), want) <= EXACT for job in jobs)
    assert [[each.rank for each in job.run.ranks] for job in jobs] == [[0, 1], [1, 2], [0]]


@pytest.mark.breadth
@pytest.mark.parametrize("number", [3, 40])
def test_random_sequences_of_jobs(four: ParallelPipeline, number: int) -> None:
    """Any sets of ranks, some cancelled: descriptors and threads are as before."""
    chance, wanted = random.Random(number), submitted(four, (0,), 0).result(SECONDS)
    counted = []
    for _ in range(number):
        order = tuple(chance.sample(range(WORLD), WORLD))
        cut = chance.randrange(1, WORLD)
        jobs = [submitted(four, ranks, 0) for ranks in (order[:cut], order[cut:])]
        victim = submitted(four, order[:2], 0, num_inference_steps=100)
        assert all(relative_error(job.result(SECONDS), wanted) <= EXACT for job in jobs)
        victim.cancel()
        with pytest.raises(CallCancelled):
            victim.result(SECONDS)
        counted.append((len(list(Path("/proc/self/fd").iterdir())), threading.active_count()))
    assert all(each[0] <= counted[0][0] + 2 and each[1] <= counted[0][1] for each in counted)


def test_one_device_runs_its_jobs_in_turn(one: ParallelPipeline, plain: Any) -> None:
    jobs = [one.submit(**CALL, generator=generator(seed)) for seed in range(2)]
    endless = one.submit(**{**CALL, "num_inference_steps": 500}, generator=generator())
    found = [job.result(SECONDS) for job in jobs]
    assert relative_error(found[0], plain(**CALL, generator=generator(0))) <= EXACT
    assert jobs[1].progress.step == 2
    while endless.progress.step < 1:
        time.sleep(0.01)
    endless.cancel()
    with pytest.raises(CallCancelled):
        endless.result(SECONDS)
